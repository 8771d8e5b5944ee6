"""The package's own `bfcl evaluate` on files of ours, where the whole package (with its many pins) is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import bfcl_folder  # noqa: F401 (skips without bfcl-eval)
import pytest

# Some of what only the whole package brings; importing the package itself takes ten seconds.
ABSENT = [
    name for name in ("qwen_agent", "cohere", "mistralai", "typer", "faiss") if not importlib.util.find_spec(name)
]
EXPERIMENT = Path(__file__).parents[2] / "experiments" / "official" / "compare_evaluate.py"


@pytest.mark.skipif(bool(ABSENT), reason=f"only the whole bfcl-eval has {ABSENT}; see {EXPERIMENT.name}")
def test_bfcl_evaluate_judges_every_task_as_we_do(tmp_path):
    spec = importlib.util.spec_from_file_location("compare_evaluate", EXPERIMENT)
    assert spec is not None and spec.loader is not None
    experiment = sys.modules["compare_evaluate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(experiment)
    assert experiment.compare(100, tmp_path, seed=2, chats=("hermes",)) == []
