"""This package beside google-tunix and transformers: the same weights, the same tokens, one machine, one run.

    python -m experiments.benchmarks.peers --peer_python=PYTHON_WITH_TUNIX --out=peers.json
    python -m experiments.benchmarks.peers --table=peers.json

The model is SmolLM2-135M's Llama with random weights, the group 8 rows of 128 tokens after a prompt of 512, float32 on
the CPU. PYTHON_WITH_TUNIX is a Python 3.12 with `pip install google-tunix libtpu`; this Python needs torch (and
`libtpu` for aot; --tpu_python names another that has it). Parts (`--only=update,rollout`):

- update: the whole of `Learner.update`, without and with remat, against tunix's GRPO loss, gradient and AdamW with
  block remat. Both must find the same log-probs and gradient norm, or the comparison is void. With them `matmul`.
- rollout: `RolloutEngine` against tunix's native sampler, all rows to their last token. generate: against transformers'
  torch `generate` on as many threads as there are CPUs.
- matmul: `jnp.dot` on a large square and on the model's own shapes.
- aot: the update compiled by both for a TPU v5p: operations, bytes, memory; also two layers of Qwen2.5-7B's dimensions
  at BFCL's lengths.
- growth: see `growth`.

Each contestant is a process of its own that has loaded, compiled and run once before; then they take turns, step by
step, so that a machine's noise falls on all. The peak is that of the contestant's resident memory from its start on.
What is finished is kept in --out, and a second call goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from experiments.benchmarks.table import table
from experiments.benchmarks.worker import ROOT, Failed, Worker
from seal_jax.files import write_whole
from seal_jax.provenance import git_commit, host, versions

#: part -> contestant -> (which Python, module, its argument)
TURNS: dict[str, dict[str, tuple[str, str, str]]] = {
    "matmul": {"matmul": ("own", "ours", "matmul")},
    "update": {
        "ours_none": ("own", "ours", "update_none"),
        "ours_block": ("own", "ours", "update_block"),
        "tunix": ("peer", "peer_tunix", "update"),
        "matmul": ("own", "ours", "matmul"),
    },
    "rollout": {"ours": ("own", "ours", "rollout"), "tunix": ("peer", "peer_tunix", "rollout")},
    "generate": {"ours": ("own", "ours", "rollout"), "transformers": ("own", "peer_transformers", "generate")},
}
PARTS = (*TURNS, "aot", "growth")
#: What is compiled ahead of time beside the shape that is run.
ALSO_COMPILED = {"smollm2_135m": ("qwen25_7b_2layers",)}


class Bench:
    """The run: where it writes, which Pythons it has."""

    def __init__(self, shape: str, out: Path, pythons: dict[str, str], repeats: int) -> None:
        self.shape, self.out, self.pythons, self.repeats = shape, out, pythons, repeats
        self.folder = out.with_suffix(".case")
        self.found: dict[str, Any] = {"shape": shape, "host": host(), "parts": {}}
        if out.exists():
            self.found = json.loads(out.read_text())
            if self.found["shape"] != shape:
                raise SystemExit(f"{out} holds --shape={self.found['shape']}; give that, or another --out")

    def run(self, parts: list[str]) -> None:
        if not (self.folder / "case.json").exists():
            self._run_to_end("own", "case", self.shape, str(self.folder))
        for part in parts:
            kept = self.found["parts"].get(part)
            if kept and not any("failed" in contestant for contestant in kept.values()):
                print(f"{part}: kept", file=sys.stderr)
                continue
            print(f"{part}: load {os.getloadavg()[0]:.1f} ...", file=sys.stderr)
            if part in TURNS:
                self._take_turns(part)
            elif part == "aot":
                self._compile_ahead()
            else:
                short = "--short" if self.shape == "tiny" else ""
                self._keep("growth", {"growth": self._run_to_end("own", "growth", short)[0]})

    def _keep(self, part: str, contestants: dict[str, Any]) -> None:
        self.found["parts"][part] = contestants
        self.found |= {"versions": versions(), "git": git_commit()}
        write_whole(self.out, json.dumps(self.found, indent=1) + "\n")

    def _take_turns(self, part: str) -> None:
        contestants: dict[str, Any] = {}
        workers: dict[str, Worker] = {}
        try:
            for name, (python, module, argument) in TURNS[part].items():
                arguments = (argument, str(self.folder)) if module != "peer_transformers" else (str(self.folder),)
                worker = self._start(f"{part}_{name}", python, module, *arguments)
                try:
                    contestants[name] = {**worker.ready(), "load": os.getloadavg()[0], "steps": []}
                    workers[name] = worker
                except Failed as failure:
                    contestants[name] = {"failed": str(failure)}
            for _ in range(self.repeats):
                for name, worker in list(workers.items()):
                    try:
                        contestants[name]["steps"].append(worker.step())
                    except Failed as failure:
                        contestants[name] = {"failed": str(failure)}
                        del workers[name]
            for name, worker in workers.items():
                contestants[name] |= worker.end()
        finally:
            for worker in workers.values():
                worker.kill()
        if part == "update":
            self._compare_log_probs(contestants)
        self._keep(part, contestants)

    def _compare_log_probs(self, contestants: dict[str, Any]) -> None:
        import numpy as np

        if "failed" in contestants["tunix"]:
            return
        theirs = np.load(self.folder / "logp_tunix.npy")[:, 1:]
        for remat in ("none", "block"):
            ours = np.load(self.folder / f"logp_ours_{remat}.npy")[:, 1:]
            contestants[f"ours_{remat}"]["logp_difference"] = float(np.abs(ours - theirs).max())

    def _compile_ahead(self) -> None:
        found: dict[str, Any] = {}
        for shape in (self.shape, *ALSO_COMPILED.get(self.shape, ())):
            for python, module in (("tpu", "ours"), ("peer", "peer_tunix")):
                try:
                    for line in self._run_to_end(python, module, "aot", shape):
                        found[f"{shape} {line['contestant']}"] = line
                except Failed as failure:
                    found[f"{shape} {module}"] = {"failed": str(failure)}
                self._keep("aot", found)

    def _start(self, log: str, python: str, module: str, *arguments: str) -> Worker:
        logs = self.out.with_suffix(".logs")
        logs.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        command = ["-m", f"experiments.benchmarks.{module}", *(a for a in arguments if a)]
        return Worker(self.pythons[python], command, logs / f"{log}.log", env)

    def _run_to_end(self, python: str, module: str, *arguments: str) -> list[dict[str, Any]]:
        """All that a contestant without turns says."""
        return self._start(f"{module}_{'_'.join(arguments).replace('/', '_')}", python, module, *arguments).all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("peers.json"))
    parser.add_argument("--peer_python", default="", help="a Python 3.12 with google-tunix (and libtpu, for aot)")
    parser.add_argument("--tpu_python", default=sys.executable, help="a Python with this package's needs and libtpu")
    parser.add_argument("--shape", default="smollm2_135m", choices=sorted(ALSO_COMPILED) + ["tiny"])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--table", type=Path, help="only print this file's table")
    flags = parser.parse_args()
    if flags.table:
        print(table(json.loads(flags.table.read_text())))
        return
    parts = flags.only.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"--only={flags.only}: {unknown[0]!r} is not one of {','.join(PARTS)}")
    peers_wanted = any(part == "aot" or any(p == "peer" for p, _, _ in TURNS.get(part, {}).values()) for part in parts)
    if peers_wanted and not flags.peer_python:
        parser.error("--peer_python=PYTHON is needed: a Python 3.12 with `pip install google-tunix libtpu`")
    pythons = {"own": sys.executable, "peer": flags.peer_python, "tpu": flags.tpu_python}
    bench = Bench(flags.shape, flags.out.absolute(), pythons, flags.repeats)
    bench.run(parts)
    print(table(bench.found))


if __name__ == "__main__":
    main()
