"""The splits SEAL and its successors report on, by scenario number, so that no scenario is on both sides; and anyone's
own split file.

Number n stands for the same scenario in all four categories. The numbers are those of the parquet files released with
the paper (T3RL's split); the JSON split file in the same release is another one, with 344 of 400 evaluation tasks
leaked, and must not be mixed with it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seal_jax.types import CATEGORIES

N_SCENARIOS = 200


def _numbers(text: str) -> frozenset[int]:
    return frozenset(int(word) for word in text.split())


TRAIN = _numbers("""
    0 2 3 5 10 12 13 14 15 16 18 19 27 30 32 33 36 37 38 42 43 44 45 46 47 51 52 54 60 61 63 64 65 66 69 72 73 76 78 79
    80 83 84 85 95 100 101 102 103 104 105 106 109 110 111 112 113 115 118 121 122 123 125 126 128 130 133 135 136 140
    142 144 145 146 148 153 155 156 158 159 160 161 162 165 167 170 171 172 175 176 177 179 184 186 187 192 193 194 195
    196
""")
ALL = frozenset(range(N_SCENARIOS))
EVAL = ALL - TRAIN
VAL = _numbers("4 9 21 29 34 48 77 81 82 98 99 120 124 127 131 132 134 138 149 164 169 174 178 183 198")

#: Split name → scenario numbers. Select on "val", report on "test" (and on "eval" = val + test, as the paper does).
SPLITS = {"train": TRAIN, "val": VAL, "test": EVAL - VAL, "eval": EVAL, "all": ALL}

#: Split name → task ids, of all categories.
Splits = Mapping[str, frozenset[str]]

#: What a split file may hold. The JSON split of the release also holds the "seed" it was drawn with: allowed, not read.
FILE_SPLITS = ("train", "val", "test", "eval", "ood")
_NOT_READ = ("seed",)


def task_id(category: str, number: int) -> str:
    return f"multi_turn_{category}_{number}"


def scenario(task: str) -> int:
    """The scenario number of a task id."""
    return int(task.rsplit("_", 1)[1])


def _of_numbers(numbers: frozenset[int]) -> frozenset[str]:
    return frozenset(task_id(category, n) for category in CATEGORIES for n in numbers)


def paper_splits() -> Splits:
    return {name: _of_numbers(numbers) for name, numbers in SPLITS.items()}


def shared_scenarios(train: frozenset[str], evaluated: frozenset[str]) -> tuple[int, frozenset[int]]:
    """How many tasks of `evaluated` are of a scenario that `train` has a task of, and which scenarios these are."""
    both = frozenset(map(scenario, train)) & frozenset(map(scenario, evaluated))
    return sum(scenario(task) in both for task in evaluated), both


def read_splits(path: str | Path, *, allow_overlap: bool = False) -> Splits:
    """The splits of a JSON file {"train": [...], "val": [...], "test": [...], "eval": [...], "ood": [...]}.

    Each entry is a scenario number (its tasks of all categories) or a task id (that task alone). No split is required;
    "eval" is val and test together where the file does not give it, and "all" is always all 800 tasks.

    Raises:
      ValueError: one line naming the file, the key, the value and the mend, for anything that is not such a file, and
        for splits that share scenarios: any evaluated split with train, or val (which selects) with test (which
        reports). `allow_overlap` turns the latter into a warning.
    """
    path = Path(path)
    splits = {key: _read_split(path, key, entries) for key, entries in _read_object(path).items()}
    pairs = [("train", name) for name in splits if name != "train"] + [("val", "test")]
    for one, other in pairs:
        count, numbers = shared_scenarios(splits.get(one, frozenset()), splits.get(other, frozenset()))
        if count:
            what = (
                f"{path}: {count} of the {len(splits[other])} tasks in {other!r} are of {len(numbers)} scenarios that "
                f"{one!r} holds too, e.g. number {min(numbers)}"
            )
            if not allow_overlap:
                raise ValueError(f"{what}; keep each number on one side, or set suite_options.allow_overlap=True")
            warnings.warn(f"{what}; allowed by suite_options.allow_overlap", stacklevel=2)
    held_out = splits.get("val", frozenset()) | splits.get("test", frozenset())
    if held_out:
        splits.setdefault("eval", held_out)
    return {**splits, "all": _of_numbers(ALL)}


def _read_object(path: Path) -> dict[str, Any]:
    mend = 'write a JSON object such as {"train": [0, 2], "val": [4], "test": [1, 6]}'
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"), object_pairs_hook=_no_key_twice)
    except OSError as error:
        raise ValueError(
            f"suite_options.split_file={str(path)!r}: {error.strerror}; name a file that is there"
        ) from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or a key given twice
        raise ValueError(f"{path}: not a split file ({error}); {mend}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}, not an object; {mend}")
    unknown = [key for key in value if key not in (*FILE_SPLITS, *_NOT_READ)]
    if unknown:
        raise ValueError(f"{path}: key {unknown[0]!r} is not a split; choose from {', '.join(FILE_SPLITS)}")
    splits = {key: entries for key, entries in value.items() if key not in _NOT_READ}
    if not splits:
        raise ValueError(f"{path}: holds no split; {mend}")
    return splits


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = [key for i, key in enumerate(keys) if key in keys[:i]]
    if twice:
        raise ValueError(f"key {twice[0]!r} stands twice")
    return dict(pairs)


def _read_split(path: Path, key: str, entries: Any) -> frozenset[str]:
    if not isinstance(entries, list):
        raise ValueError(f"{path}: key {key!r} holds {entries!r:.60}; write a list of scenario numbers or task ids")
    if not entries:
        raise ValueError(f"{path}: key {key!r} is an empty list; leave the key out or list some tasks")
    known = _of_numbers(ALL)
    found: set[str] = set()
    for i, entry in enumerate(entries):
        where = f"{path}: {key}[{i}]={entry!r:.60}"
        if isinstance(entry, int) and not isinstance(entry, bool):
            if entry not in ALL:
                raise ValueError(f"{where} is no scenario number; they are 0 to {N_SCENARIOS - 1}")
            tasks = _of_numbers(frozenset({entry}))
        elif isinstance(entry, str) and entry in known:
            tasks = frozenset({entry})
        else:
            raise ValueError(
                f"{where} is neither a scenario number such as 24 nor a task id such as multi_turn_base_24"
            )
        if tasks & found:
            raise ValueError(
                f"{where} is in {key!r} already (a number stands for its tasks of all categories); drop it"
            )
        found |= tasks
    return frozenset(found)
