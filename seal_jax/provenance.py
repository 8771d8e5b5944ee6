"""Where a run comes from: versions, git commit, device, host, command and seed. Logged at every start."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "seal-jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "transformers",
    "tokenizers",
    "safetensors",
    "ml_collections",
    "numpy",
    "bfcl-eval",
    "gguf",
)


def versions() -> dict[str, str]:
    """{package: installed version} of what a result depends on; "absent" for what is not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def git_commit(folder: str | Path | None = None) -> dict[str, Any]:
    """{"commit": hash, "dirty": do tracked files differ from it}; "unknown" and None where git cannot tell."""
    folder = Path(folder) if folder is not None else Path(__file__).resolve().parent

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        # An installed copy may lie inside somebody else's repository: only a tree that tracks this file counts.
        git("ls-files", "--error-unmatch", "--", ".")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        # A tree that was sent somewhere without its history may be told what it is (experiments/tpu does so).
        return {"commit": os.environ.get("SEAL_JAX_COMMIT", "unknown"), "dirty": None}


def devices() -> dict[str, Any]:
    """The accelerator as jax sees it (this initialises jax's backend)."""
    import jax

    local = jax.local_devices()
    return {
        "platform": local[0].platform,
        "kind": local[0].device_kind,
        "count": jax.device_count(),
        "local_count": len(local),
        "process_index": jax.process_index(),
        "process_count": jax.process_count(),
    }


def host() -> dict[str, Any]:
    """The machine: system, CPUs that this process may use, memory in GiB (None where it cannot be read)."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):
        memory = None
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpus": usable,
        "memory_gib": None if memory is None else round(memory, 1),
    }


def provenance(*, seed: int | None = None, **more: Any) -> dict[str, Any]:
    """Everything above in one JSON-able dict, plus the command line, the time and what the caller adds."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [os.path.basename(sys.executable), *sys.argv],
        "seed": seed,
        "versions": versions(),
        "git": git_commit(),
        "device": devices(),
        "host": host(),
        **more,
    }


def describe(record: dict[str, Any]) -> str:
    """A start-up log line of a provenance record."""
    v, device, git = record["versions"], record["device"], record["git"]
    dirty = "+changes" if git["dirty"] else ""
    return (
        f"seal_jax {v['seal-jax']} ({git['commit'][:10]}{dirty}), python {v['python']}, jax {v['jax']}, "
        f"flax {v['flax']}, {device['count']} x {device['kind']} ({device['platform']}), "
        f"{record['host']['cpus']} CPUs, seed {record['seed']}"
        + (f", evaluated by protocol {', '.join(record['protocols'])}" if "protocols" in record else "")
    )
