"""Checkpoints: everything a resume needs, through Orbax; and the check that a workdir belongs to this config.

A checkpoint of round r holds two items, committed together by one atomic rename (a half-written one is ignored):
`state`, a pytree of arrays (parameters, optimiser state), and `host`, JSON-able host state (round, data position,
interface, profile, dynamic weights, chrono, ...). The last `keep` rounds stay, and beside them the best one by
validation score. Which one is best is itself part of every checkpoint, so it is known after a resume: the first
validation of a resumed run has to beat the real best before that may go.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from orbax.checkpoint import checkpoint_managers

from seal_jax.files import read_object, write_whole

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_FORMAT = 1


@dataclass(frozen=True)
class Best:
    """The round with the highest validation score so far."""

    round: int
    score: float


class _KeepLastAndBest(checkpoint_managers.PreservationPolicy):
    """The newest `keep` rounds and the best one; `best` is set by the owner before each save."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.best: Best | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        newest = {info.step for info in sorted(checkpoints, key=lambda info: info.step)[-self.keep :]}
        best = None if self.best is None else self.best.round
        return [info.step in newest or info.step == best for info in checkpoints]


class Checkpoints:
    """The checkpoints of one run.

    Args:
      folder: where they live, e.g. `workdir / "checkpoints"`. With several hosts it must be one shared file system
        (every host writes its own shards); "gs://..." needs `pip install gcsfs`.
      keep: how many of the newest rounds stay, beside the best one.

    Saving is synchronous: when `save` returns, the checkpoint is complete on disk, so buffers may be donated and the
    process may exit.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"config.checkpoint.keep={keep} must be at least 1: a resume needs the newest round")
        self.folder = epath.Path(folder).absolute() if "://" not in str(folder) else epath.Path(folder)
        self._policy = _KeepLastAndBest(keep)
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_names=("state", "host"),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self._policy,
                enable_async_checkpointing=False,
                cleanup_tmp_directories=True,
                create=True,
            ),
        )
        latest = self.latest()
        if latest is not None:
            best = self._read_host(latest)["best"]
            if best is not None and best["round"] not in self.rounds():
                logging.warning(
                    "checkpoint %s, the best so far, is gone: the best is sought anew", self.folder / str(best["round"])
                )
                best = None
            self._policy.best = None if best is None else Best(int(best["round"]), float(best["score"]))

    # --- what there is -----------------------------------------------------------------------------------------------
    def rounds(self) -> list[int]:
        """The rounds with a complete checkpoint, ascending. A damaged one (an item is missing) is left out, loudly."""
        complete = []
        for step in sorted(self._manager.all_steps()):
            missing = [item for item in ("state", "host") if not (self.folder / str(step) / item).exists()]
            if missing:
                logging.warning("checkpoint %s has no %s: ignored", self.folder / str(step), " and no ".join(missing))
            else:
                complete.append(int(step))
        return complete

    def latest(self) -> int | None:
        """The newest round with a complete checkpoint; None in a fresh workdir."""
        rounds = self.rounds()
        return rounds[-1] if rounds else None

    @property
    def best(self) -> Best | None:
        """The best validation score saved so far; None before the first `save` with a score."""
        return self._policy.best

    # --- save and restore --------------------------------------------------------------------------------------------
    def save(self, round: int, state: Any, host: Mapping[str, Any], *, score: float | None = None) -> bool:
        """Saves a round; returns True if its score is the best so far (strictly: a tie keeps the older round).

        Args:
          round: number of finished rounds (0 = before the first one).
          state: pytree of jax or numpy arrays.
          host: JSON-able; numpy scalars and arrays become numbers and lists, tuples become lists.
          score: validation score, higher is better; None = this round was not validated. NaN never becomes the best.
        """
        if round in self._manager.all_steps():
            if round in self.rounds():
                raise ValueError(f"{self.folder / str(round)}: round {round} is already saved; resume from it instead")
            self._manager.delete(round)  # damaged: see rounds()
        best, improved = self.best, False
        if score is not None and math.isfinite(score) and (best is None or score > best.score):
            best, improved = Best(round, float(score)), True
        record = {
            "format": _FORMAT,
            "best": None if best is None else asdict(best),
            "leaves": _leaves(state),
            "host": plain(host, "host"),
        }
        before, self._policy.best = self._policy.best, best  # the policy runs inside save()
        try:
            self._manager.save(
                round, args=ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(record))
            )
        except BaseException:
            self._policy.best = before
            raise
        return improved

    def restore(self, like: Any, round: int | str | None = None) -> tuple[Any, dict[str, Any]]:
        """Loads (state, host) of a round, of the "best" one, or of the latest (None).

        Args:
          like: pytree that the state must have: arrays, or `jax.ShapeDtypeStruct` with a sharding. Arrays are restored
            onto *its* shardings, so the mesh may differ from the one that saved them, and with it the padding of the
            vocabulary: rows of zeros are added, or padding is cut.

        Raises ValueError if there is no such checkpoint, or if it does not fit `like`.
        """
        chosen = self._resolve(round)
        saved, wanted = self._read_host(chosen)["leaves"], _leaves(like)
        differing = [n for n in sorted(saved.keys() | wanted.keys()) if not _fits(n, saved.get(n), wanted.get(n))]
        if differing:
            # Compared here, before any array is read: Orbax would cast a dtype silently and fail late on a shape.
            name = differing[0]
            raise ValueError(
                f"{self.folder / str(chosen)} does not fit this config's state (state{name}: "
                f"{_show(saved, name)} there, {_show(wanted, name)} here); "
                "resume with the config of the run, or start in a new --workdir"
            )
        targets = jax.tree.map(_target, like)
        restored = self._load(
            chosen, state=ocp.args.StandardRestore(targets, strict=saved == wanted), host=ocp.args.JsonRestore()
        )
        return restored["state"], restored["host"]["host"]

    def close(self) -> None:
        """Waits for whatever Orbax still does. Also called at the end of a `with` block."""
        self._manager.wait_until_finished()
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _resolve(self, round: int | str | None) -> int:
        rounds = self.rounds()
        if round == "best":
            round = None if self.best is None else self.best.round
            if round is None:
                raise ValueError(f"{self.folder}: no round has a validation score yet, so there is no best one")
        elif round is None:
            round = rounds[-1] if rounds else None
        if round not in rounds:
            raise ValueError(f"{self.folder}: no checkpoint of round {round}; there are {rounds}")
        return int(round)

    def _read_host(self, round: int) -> dict[str, Any]:
        record = self._load(round, host=ocp.args.JsonRestore())["host"]
        if not isinstance(record, dict) or "format" not in record:
            raise self._damaged(round, "its host state has no format")
        if record["format"] != _FORMAT:
            raise ValueError(
                f"{self.folder / str(round)}: checkpoint format {record['format']}, this version reads {_FORMAT}; "
                "resume with the seal_jax version that wrote it"
            )
        missing = {"best", "leaves", "host"} - record.keys()
        if missing:
            raise self._damaged(round, f"its host state lacks {', '.join(sorted(missing))}")
        return record

    def _load(self, round: int, **items: Any) -> Any:
        try:
            return self._manager.restore(round, args=ocp.args.Composite(**items))
        except (jax.errors.JaxRuntimeError, MemoryError, PermissionError):
            raise  # no fault of the files
        except Exception as error:  # Orbax, TensorStore and JSON have no common error for bytes they cannot read
            first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise self._damaged(round, first_line) from error

    def _damaged(self, round: int, reason: str) -> ValueError:
        return ValueError(
            f"checkpoint {self.folder / str(round)} is damaged ({reason}); "
            "remove that folder to resume from the round before"
        )


def _leaves(state: Any) -> dict[str, str]:
    """{path in the tree: "dtype[shape]"} of every array; what must agree between a checkpoint and a state."""
    named, _ = jax.tree_util.tree_flatten_with_path(state)
    for path, leaf in named:
        if not hasattr(leaf, "dtype"):
            raise TypeError(f"state{jax.tree_util.keystr(path)} is a {type(leaf).__name__}; state holds arrays only")
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in named}


def _fits(name: str, saved: str | None, wanted: str | None) -> bool:
    """Whether two descriptions of `_leaves` are of one array, apart from the padding of a vocabulary."""
    padded = re.search(r"\['(embed_vd|head_dv)'\]$", name)  # a parameter of the policy, or its moments
    if saved is None or wanted is None or padded is None:
        return saved == wanted
    width = "[0-9]+, ([0-9]+)" if padded[1] == "embed_vd" else "([0-9]+), [0-9]+"
    return re.sub(width, r"\1", saved, count=1) == re.sub(width, r"\1", wanted, count=1)


def _target(leaf: Any) -> Any:
    """What Orbax is asked for in the place of one leaf of `like`."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return leaf  # numpy arrays stay on the host


def plain(value: Any, where: str) -> Any:
    """JSON-able copy of host state; TypeError naming the field for anything that JSON cannot hold."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where}: key {key!r} is not a string; JSON would change it")
        return {key: plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, (np.generic, np.ndarray, jax.Array)):
        return np.asarray(value).tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{where}: {type(value).__name__} cannot be saved as JSON; give numbers, strings, lists or dicts")


# --- the workdir -----------------------------------------------------------------------------------------------------
def hold_workdir(workdir: str | Path, flag: str = "--workdir") -> IO[str]:
    """Creates the workdir and locks it, so that no second process cuts this one's record or cleans up its half-written
    save. Whoever keeps the returned file open holds the lock; it ends with `close()` or with the process.

    ValueError in one line, naming the `flag` that chose it, if another process holds it or it cannot be a folder.
    """
    path = Path(workdir) / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise ValueError(
            f"workdir {workdir} cannot be a folder to write to ({error.strerror}: {error.filename}); "
            f"choose another {flag}"
        ) from error
    if fcntl is None or jax.process_index() != 0:  # of several hosts, the first one holds the shared folder
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        pid = file.read().strip()
        file.close()
        raise ValueError(
            f"workdir {workdir} is in use by another process (pid {pid}); wait until it ends, or choose another {flag}"
        ) from error
    except OSError as error:  # a file system without locks
        logging.warning("%s cannot be locked (%s): start no second process on this workdir", path, error.strerror)
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def drop_workdir(workdir: str | Path, results: Sequence[str] = ("checkpoints", "start")) -> None:
    """Removes the workdir that a start made before it failed; not if it holds results (see `check_workdir`)."""
    folder = Path(workdir)
    with contextlib.suppress(OSError):  # of rmdir: something is in there
        for name in results:
            if (folder / name).is_dir():
                (folder / name).rmdir()
        if all(path.name in ("config.json", ".lock") for path in folder.iterdir()):
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()


def check_workdir(
    workdir: str | Path,
    config: Mapping[str, Any],
    *,
    free: Sequence[str] = (),
    results: Sequence[str] = ("checkpoints", "start"),
) -> bool:
    """Ties a workdir to its config: writes config.json the first time, compares with it later (`write_config` then
    puts the changed `free` values in it, once the resume is known to work).

    Args:
      config: the whole configuration as nested dicts (`ConfigDict.to_dict()`).
      free: dotted names (or their leading parts) that may change on a resume, e.g. ("rounds", "telemetry").
      results: folders in the workdir that a config has to answer for. While none of them holds anything (the first
        start failed early, say over a wrong path), the config may still be changed.

    Returns True if the workdir had a config already (so the run may be a resume). ValueError in one line that names up
    to five differing fields with both values, and the mend.
    """
    path = epath.Path(workdir) / "config.json"
    now = json.loads(json.dumps(plain(config, "config"), sort_keys=True))
    held = [name for name in results if _holds_something(path.parent / name)]
    if held and not path.exists():
        raise ValueError(
            f"{path} is missing but {path.parent / held[0]} is not empty, so its config is not known; "
            "put the config.json back, or choose a new --workdir"
        )
    if held:
        before = read_object(path, "put back the config.json of the run, or choose a new --workdir")
        old, new = _flat(before), _flat(now)
        differing = [
            name
            for name in sorted(old.keys() | new.keys())
            if old.get(name, _ABSENT) != new.get(name, _ABSENT)
            and not any(name == f or name.startswith(f + ".") for f in free)
        ]
        if differing:
            shown = ", ".join(f"{n}: {_show(old, n)} there, {_show(new, n)} here" for n in differing[:5])
            more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
            raise ValueError(
                f"workdir {workdir} belongs to another config ({shown}{more}); "
                "choose a new --workdir, or set these fields back"
            )
    else:
        write_config(workdir, config)
    return bool(held)


def write_config(workdir: str | Path, config: Mapping[str, Any]) -> None:
    """Writes workdir/config.json, whole or not at all (on several hosts, the first one does)."""
    if jax.process_index() == 0:
        path = epath.Path(workdir) / "config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(plain(config, "config"), indent=2, sort_keys=True) + "\n")


def _holds_something(folder: epath.Path) -> bool:
    return folder.exists() and any(True for _ in folder.iterdir())


_ABSENT = object()


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{prefix}{key}.").items()}
    return {prefix.removesuffix("."): value}


def _show(flat: Mapping[str, Any], name: str) -> str:
    return json.dumps(flat[name]) if name in flat else "absent"
