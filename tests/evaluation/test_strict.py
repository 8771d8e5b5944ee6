"""Strict evaluation with a stand-in for the engine: tasks that two reported splits share are played once; what a run
reports is written for the benchmark's own package."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from seal_jax.chat.formats import get_format
from seal_jax.chat.tokenizer import ByteTokenizer
from seal_jax.diagnose import main
from seal_jax.envs.base import make_suite
from seal_jax.envs.bfcl import package
from seal_jax.envs.toolbox import ToolboxSuite
from seal_jax.evaluation.strict import cued_evaluation, evaluate
from seal_jax.interface import Interface, InterfaceSettings
from seal_jax.learner.batch import has_cues
from seal_jax.rollout.collector import Collector
from seal_jax.rollout.engine import Sampled
from seal_jax.rollout.episode import Limits
from seal_jax.rollout.work import Work
from seal_jax.run import Run

WIDE = Limits(max_new_tokens=400, max_suffix_tokens=100_000, max_context=200_000, max_observation_tokens=10_000)


class Parrot:
    """An engine whose policy always says the same; counts the prompts it is given."""

    group_buckets = (4,)
    work = Work()

    def __init__(self, chat, text="I am done."):
        self.chat, self.text, self.prompts = chat, text, 0

    def start(self, params, prompts, rollouts, *, timer):
        self.prompts += len(prompts)
        return self

    def act_in_parts(self, pending, *, temperature, keys):
        yield
        tokenizer = ByteTokenizer(self.chat.special_tokens)
        ids = tuple(tokenizer.encode(self.text + self.chat.stop_tokens[0]))
        return {row: Sampled(ids, (-0.5,) * len(ids), False) for row in pending}


def collector(suite, chat, text="I am done."):
    return Collector(Parrot(chat, text), suite, chat, ByteTokenizer(chat.special_tokens), WIDE, seed=0)


def test_a_reported_split_plays_only_what_the_one_before_it_did_not():
    suite = ToolboxSuite(train=0, val=8, test=12, ood=0)
    val, test = suite.tasks("val"), suite.tasks("test")
    playing = collector(suite, get_format("tiny"))
    alone = evaluate(None, playing, [*val, *test], "eval")
    known = evaluate(None, playing, test, "test")
    before = playing.engine.prompts
    union = evaluate(None, playing, [*val, *test], "eval", known=known)
    assert playing.engine.prompts - before == len(val)
    assert union == alone and list(union.rewards) == [t.id for t in (*val, *test)]
    # All known already: nothing is played, in whatever order they are asked for.
    again = evaluate(None, playing, test[::-1], "part", known=union)
    assert playing.engine.prompts - before == len(val) and again.rewards == known.rewards


def test_a_cued_evaluation_shows_cues_and_leaves_the_strict_one_alone():
    suite = ToolboxSuite(train=0, val=0, test=6, ood=0)
    tasks, playing = suite.tasks("test"), collector(suite, get_format("tiny"))
    strict = evaluate(None, playing, tasks, "test")
    cued = cued_evaluation(None, playing, tasks, "test", Interface(("spurious_tool_call",)))
    assert evaluate(None, playing, tasks, "test") == strict
    assert (strict.name, cued.name, cued.cued) == ("test", "test_cued", True)
    assert all(row.cued and has_cues(row) for row in cued.trajectories)
    assert not any(row.cued or has_cues(row) for row in strict.trajectories)
    assert [t.task_id for t in cued.trajectories] == [t.id for t in tasks]
    assert cued.metrics().keys() == {name.replace("/test/", "/test_cued/") for name in strict.metrics()}
    # A cue without an occasion (no call was refused) is not shown; one in the docs stands in the prompt.
    errs = cued_evaluation(None, playing, tasks, "test", Interface(("recovery_failure",)))
    assert all(row.cued and not has_cues(row) for row in errs.trajectories)
    inline = Interface(("argument_mismatch",), InterfaceSettings(placement="inline", schema_parts=("required",)))
    docs = cued_evaluation(None, playing, tasks, "test", inline)
    decode = ByteTokenizer(get_format("tiny").special_tokens).decode
    assert all("[required]" in decode(row.prompt_ids) for row in docs.trajectories)
    assert not any("[required]" in decode(row.prompt_ids) for row in strict.trajectories)


def test_what_is_reported_is_written_as_the_package_reads_it(tmp_path, capsys):
    try:
        package.package_folder()
        package.tool_class("MathAPI")
    except ImportError as missing:
        pytest.skip(str(missing))
    suite = make_suite("bfcl", categories=("base", "miss_func"))
    result = evaluate(None, collector(suite, get_format("hermes")), suite.tasks("val")[:3], "val")
    run = SimpleNamespace(
        suite=suite,
        config=SimpleNamespace(chat="hermes"),
        recorder=SimpleNamespace(enabled=True),
        workdir=tmp_path,
        reported_round=7,
    )
    Run._write_results(run, "after", result)
    folder = tmp_path / "results" / "after" / "val.seal"
    about = json.loads((folder / "about.json").read_text())
    assert (about["split"], about["round"], about["protocol"], about["success"]) == ("val", 7, "seal", result.success)
    assert main([str(folder), "--split=val"]) == 0
    shown = capsys.readouterr().out
    assert "protocol seal" in shown and "verdicts: missing 97, empty_turn 3\n" in shown
    # A format that the package has no handler for is not written.
    run.config.chat = "tiny"
    Run._write_results(run, "before", result)
    assert not (tmp_path / "results" / "before").exists()
