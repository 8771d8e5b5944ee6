"""The whole loop on a toy policy: it runs, it records, and a resumed run is the uninterrupted one."""

import json
import shutil
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest

from configs import quickstart
from experiments.study.records import read_run
from seal_jax import loop
from seal_jax.checkpoints import Checkpoints, hold_workdir
from seal_jax.config import validate
from seal_jax.diagnosis import Profile
from seal_jax.interface import BARE
from seal_jax.run import Run, round_metrics
from seal_jax.telemetry.recorder import read_jsonl, read_trajectories
from seal_jax.types import Diagnosis, Step, Trajectory, TurnEvidence, Verdict

CLOCKED = ("time_share/", "sampled_per_s", "processed_per_s")
#: The noise of the clock, and what a second process counts anew.
UNSTABLE = ("time/", "seconds/", "count/", "memory/", "compilations", *(f"rollout/{x}" for x in CLOCKED))


def train(config, workdir):
    with Run(config, workdir) as run:
        return loop.train(run)


def evaluate_only(config, workdir):
    with Run(config, workdir) as run:
        return loop.evaluate_only(run)


def toy(**changes):
    config = quickstart.get_config("scratch")
    config.update_from_flattened_dict(
        {
            "rounds": 2,
            "tasks_per_round": 2,
            "rollouts": 2,
            "suite_options": {"train": 2, "val": 1, "test": 1, "ood": 1},
            "policy.overrides": {
                "d_model": 16,
                "n_layers": 2,
                "n_heads": 2,
                "n_kv_heads": 2,
                "head_dim": 8,
                "d_ff": 16,
            },
            "buckets.suffix": (512,),
            "buckets.chunk": (32,),
            "buckets.groups": (4,),
            "limits.max_new_tokens": 8,
            "interface.pinned": ("recovery_failure", "spurious_tool_call"),
            "interface.max_cues": 5,
            "learner.minibatches": 1,
            "learner.prompts_per_micro": 2,
            "learner.skip_zero_advantage": False,
            "loss.kl_coef": 0.01,
            "warm_start.demos": 8,
            "warm_start.epochs": 1,
            "warm_start.rows_per_step": 4,
            "eval.every": 1,
            "eval.val": 2,
            "eval.test": 2,
            "eval.ood": 2,
            "eval.cued": ("recovery_failure", "spurious_tool_call"),
            "checkpoint.every": 1,
        }
        | changes
    )
    validate(config)
    return config


def test_reasoning_that_a_template_would_have_dropped_is_counted():
    thought = Step("<think>plan</think>hello")
    rows = [
        (Trajectory("t", "base", i, 1, False, (1,), (), turns, "completed"), Verdict(0.0, "", ()), Diagnosis(()))
        for i, turns in enumerate([((thought,), (thought,)), ((Step("hello"),), (thought,))])
    ]
    assert round_metrics(rows)["train/reasoning_kept"] == 0.5


def test_progress_trains_and_counts_nowhere_else(monkeypatch):
    """The round's batch holds the shares of turns passed; what is recorded is the verifier's 0/1."""
    half = Verdict(0.0, "empty_turn", tuple(TurnEvidence(i, True, False, i == 0) for i in range(2)))
    row = Trajectory("t", "base", 0, 1, False, (1,), (), ((Step("hi"),), (Step("hi"),)), "completed")
    given, recorded = {}, []
    monkeypatch.setattr(loop, "make_batch", lambda groups, rewards, labels, **_: given.update(rewards=rewards))
    for reward, wanted in (("progress", 0.5), ("success", 0.0)):
        config = toy(reward=reward)
        run = MagicMock(config=config, round=0, batches=iter([["task"]]), interface=BARE)
        run.profiled.return_value = Profile()
        run.collector.collect.return_value, run.collector.verify.return_value = [[row, row]], half
        run.exchanged = lambda *played: played
        run.record = lambda interface, groups, verdicts, diagnoses, learned: recorded.append(verdicts)
        loop.seal_round(run)
        assert given["rewards"] == [[wanted, wanted]]
        assert run.collector.collect.call_args.kwargs["exposure"] == run.exposure.return_value
        run.exposure.assert_called_once_with(1)
        metrics = round_metrics([(x, v, Diagnosis(())) for x, v in zip([row, row], recorded[-1][0], strict=True)])
        assert metrics["train/success"] == 0.0


@pytest.mark.parametrize("before, round, wanted", [(True, 0, ["before", "after"]), (False, 0, ["after"])])
def test_the_first_report_can_be_left_out(monkeypatch, before, round, wanted):
    told, run = [], MagicMock(config=toy(**{"eval.before": before, "eval.every": 0}), round=round)
    monkeypatch.setattr(loop, "report", lambda run, when: told.append(when))
    monkeypatch.setattr(loop, "seal_round", lambda run: setattr(run, "round", run.round + 1))
    loop.train(run)
    assert told == wanted and run.round == 2


@pytest.fixture(scope="module")
def compiled():
    """Programs that XLA compiled in each round of the run `straight`, whoever asked for them."""
    return []


@pytest.fixture(scope="module")
def straight(tmp_path_factory, compiled):
    workdir, events, seal_round = tmp_path_factory.mktemp("straight"), [], loop.seal_round

    def counting(run):
        before = len(events)
        seal_round(run)
        compiled.append(len(events) - before)

    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: events.append(name) if "backend_compile" in name else None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "seal_round", counting)
        summary = train(toy(), workdir)
    return workdir, summary


def test_a_run_leaves_its_record(straight):
    workdir, summary = straight
    lines = list(read_jsonl(workdir / "metrics.jsonl"))
    assert [(x["round"], x["kind"]) for x in lines if x["kind"] == "train"] == [(1, "train"), (2, "train")]
    assert [x["round"] for x in lines if x["kind"] == "eval"] == [1, 2]  # val
    best = Checkpoints(workdir / "checkpoints").best
    assert best.round == 1  # a tie keeps the older round: what is reported is not the last one
    assert [x["round"] for x in lines if x["kind"] == "report"] == [0, 0, 0, 1, 1, 1]  # test, ood, test_cued
    reported = [x["metrics"] for x in lines if x["kind"] == "report"]
    for test, _, cued in (reported[:3], reported[3:]):  # all test tasks were played with cues too
        assert cued["eval/test_cued/success_bare"] == test["eval/test/success"]
    assert (summary["reported_round"], summary["validation"]) == (best.round, best.score)
    last = [x for x in lines if x["kind"] == "train"][-1]["metrics"]
    for name in ("train/success", "profile/pass", "loss/policy", "loss/kl", "time/extend", "rollout/steps"):
        assert name in last
    assert last["sampler_gap/max"] < 1e-3  # sampler and trainer agree on the log-probs of the same weights
    assert set(summary["evaluations"]) == {"test", "ood", "test_cued"} and summary["round"] == 2
    assert json.loads((workdir / "summary.json").read_text())["round"] == 2
    assert (workdir / "figures" / "success.png").exists() and list((workdir / "tb").glob("events*"))
    rows = read_trajectories(workdir / "trajectories" / "00002.train.jsonl.gz")
    assert rows and {"prompt_ids", "segments", "labels", "reward"} <= rows[0].keys()
    interfaces = list(read_jsonl(workdir / "interface.jsonl"))
    assert [x["round"] for x in interfaces] == [1, 2]


def test_a_run_compiles_each_declared_bucket_once(straight, compiled):
    """The first round meets all of them; the second, of other tasks, validated in between, compiles nothing at all."""
    workdir, summary = straight
    assert compiled[0] > 0 and compiled[1:] == [0]
    counts = [x["metrics"]["count/compilations"] for x in read_jsonl(workdir / "metrics.jsonl") if x["kind"] == "train"]
    # One prompt, suffix, chunk and group bucket. Engine: prefill, and for rows of training and of evaluation new rows,
    # extend, decode, and writing what either made. Learner: score, zeros, accumulate, norm, apply.
    assert counts == [1 + 2 * 5 + 5] * 2
    assert summary["compilations"] == counts[-1]


def test_half_of_each_group_saw_the_pinned_cues(straight):
    rows = read_trajectories(straight[0] / "trajectories" / "00001.train.jsonl.gz")
    for row in rows:
        shown = any(s["source"] == "cue" for s in row["segments"])
        assert shown == row["cued"]
    assert 0 < sum(r["cued"] for r in rows) < len(rows)
    for split in ("test", "ood", "val"):
        for path in (straight[0] / "trajectories").glob(f"*.{split}.jsonl.gz"):
            assert not any(s["source"] == "cue" for r in read_trajectories(path) for s in r["segments"])
    cued = [read_trajectories(straight[0] / "trajectories" / f"0000{r}.report.test_cued.jsonl.gz") for r in (0, 1)]
    assert all(r["cued"] and any(s["source"] == "cue" for s in r["segments"]) for rows in cued for r in rows)


def test_resumed_is_uninterrupted(straight, tmp_path):
    """One round, then a new process state, then the second round: same rows, same losses, same parameters, same Ω."""
    train(toy(rounds=1), tmp_path)
    train(toy(), tmp_path)
    whole, resumed = (list(read_jsonl(w / "metrics.jsonl")) for w in (straight[0], tmp_path))
    whole = [x for x in whole if x["kind"] == "train"]
    resumed = [x for x in resumed if x["kind"] == "train"]
    assert [x["round"] for x in resumed] == [1, 2]
    for a, b in zip(whole, resumed, strict=True):
        stable = {k for k in a["metrics"] if not k.startswith(UNSTABLE)}
        assert {k: a["metrics"][k] for k in stable} == {k: b["metrics"][k] for k in stable}
        assert a["cues"] == b["cues"]
    for name in ("00001.train.jsonl.gz", "00002.train.jsonl.gz"):
        assert (straight[0] / "trajectories" / name).read_bytes() == (tmp_path / "trajectories" / name).read_bytes()
    states = [Checkpoints(w / "checkpoints") for w in (straight[0], tmp_path)]
    hosts = [c._read_host(c.latest())["host"] for c in states]
    for key in ("batches", "interface", "profile", "weights", "before"):
        assert hosts[0][key] == hosts[1][key]
    assert states[0].best == states[1].best


def test_a_finished_run_only_reports(straight):
    workdir, summary = straight
    first = list(read_jsonl(workdir / "metrics.jsonl"))
    again = evaluate_only(toy(), workdir)
    for key in ("round", "reported_round", "validation", "evaluations", "before"):
        assert again[key] == summary[key]
    lines = list(read_jsonl(workdir / "metrics.jsonl"))
    assert [(x["round"], x["kind"], x["metrics"].keys()) for x in lines] == [
        (x["round"], x["kind"], x["metrics"].keys()) for x in first
    ]


def test_a_report_on_other_tasks_than_before_ends_with_a_note(straight, tmp_path, capsys):
    workdir = shutil.copytree(straight[0], tmp_path / "copy")
    summary = evaluate_only(toy(**{"eval.test": 1}), workdir)
    shown = capsys.readouterr().out
    assert "test: " in shown and "these tasks were not evaluated before training" in shown
    assert (
        set(summary["evaluations"])
        == {"test", "ood", "test_cued"}
        == set(json.loads((workdir / "summary.json").read_text())["before"])
    )


def test_a_workdir_of_another_config_is_refused(straight):
    with pytest.raises(ValueError, match="belongs to another config .*rollouts: 2 there, 4 here"):
        train(toy(rollouts=4), straight[0])


def test_a_start_over_and_a_resume_are_told(straight, tmp_path, capsys):
    workdir = shutil.copytree(straight[0], tmp_path / "copy")
    Run(toy(), workdir).__exit__()
    assert f"resumed from {workdir} after round 2 of 2" in capsys.readouterr().out
    shutil.rmtree(workdir / "checkpoints")
    Run(toy(), workdir).__exit__()
    told = f"no checkpoint in {workdir} yet: starting at round 0 (the records of 2 rounds are replaced)"
    assert told in capsys.readouterr().out


def test_a_second_process_on_a_live_workdir_is_refused(straight):
    with hold_workdir(straight[0]), pytest.raises(ValueError, match="is in use by another process"):
        Run(toy(), straight[0])


def test_a_start_that_fails_changes_nothing(straight):
    def files():
        return {p: p.read_bytes() for p in straight[0].rglob("*") if p.is_file() and p.name != ".lock"}

    before = files()
    with pytest.raises(ValueError, match="config.eval.test=1000"):
        Run(toy(rounds=3, **{"eval.test": 1000}), straight[0])
    assert files() == before
    hold_workdir(straight[0]).close()  # nor does it keep the workdir locked


def test_prompts_that_do_not_fit_are_refused_before_anything_compiles(tmp_path):
    with pytest.raises(ValueError, match=r"its prompt has \d+ tokens, more than config.buckets.prompt\[-1\]=64"):
        train(toy(**{"buckets.prompt": (64,), "warm_start.enabled": False}), tmp_path)


def test_training_changes_the_policy_only_where_it_should(straight):
    """The starting policy is kept beside the run; the trained one differs from it."""
    from seal_jax.policy.hf import load_hf

    config, start = load_hf(straight[0] / "start")
    like = jax.eval_shape(lambda: start)
    assert like["embed_vd"].shape[1] == 16 == config.d_model
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(start))


@pytest.mark.slow
def test_a_run_from_a_folder_with_all_the_settings_of_the_study(straight, tmp_path, capsys):
    """Warm-started from a folder, annealed, shuffled, rewarded with progress, no report before; and resumed."""
    from seal_jax.chat.tokenizer import load_tokenizer
    from seal_jax.policy.hf import load_hf

    settings = {
        "policy.source": "hf",
        "policy.path": str(straight[0] / "start"),
        "interface.exposure": 1.0,
        "interface.anneal_rounds": 1,
        "loss.reweight": "paper",
        "loss.shuffle_labels": True,
        "reward": "progress",
        "eval.before": False,
    }
    train(toy(rounds=1, **settings), tmp_path)
    kept = load_hf(tmp_path / "start")[1]
    summary = train(toy(**settings), tmp_path)
    assert "these tasks were not evaluated before training" in capsys.readouterr().out
    assert summary["before"] == {} and set(summary["evaluations"]) == {"test", "ood", "test_cued"}
    lines = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert all(x["round"] > 0 for x in lines)
    for r, cued in ((1, True), (2, False)):
        rows = read_trajectories(tmp_path / "trajectories" / f"0000{r}.train.jsonl.gz")
        assert {row["cued"] for row in rows} == {cued}
        assert all(row["reward"] in (0.0, 1.0) for row in rows)
    jax.tree.map(np.testing.assert_array_equal, load_hf(tmp_path / "start")[1], kept)
    base = load_hf(straight[0] / "start")[1]
    assert not np.array_equal(kept["embed_vd"], base["embed_vd"])
    clone, origin = (load_tokenizer(w / "start") for w in (tmp_path, straight[0]))
    assert clone.vocab_size == origin.vocab_size and clone.encode("list the desk") == origin.encode("list the desk")
    record = read_run(tmp_path, arm="all")
    assert (record["arm"], record["rounds"], set(record["success"])) == ("all", 2, {"test", "ood", "test_cued"})
    assert record["cost"]["episodes"] == 2 * 2 * 2 and record["cost"]["seconds"] > 0


@pytest.mark.slow
def test_a_run_with_adapters_resumes_and_is_exported(tmp_path):
    """The base comes from the start again, the adapters from the checkpoint; what is exported is both."""
    from seal_jax.chat.tokenizer import load_tokenizer
    from seal_jax.policy.hf import load_hf, save_hf
    from seal_jax.policy.lora import merge, split

    lora = {"policy.lora_rank": 2, "policy.lora_alpha": 4.0, "optimizer.learning_rate": 0.01}
    train(toy(rounds=1, **lora), tmp_path)
    train(toy(**lora), tmp_path)
    config, base = load_hf(tmp_path / "start")
    with Run(toy(**lora), tmp_path) as run:
        loop.export(run)
        jax.tree.map(np.testing.assert_array_equal, split(run.learner.params)[0], base)
        assert any(np.asarray(x).any() for n, x in run.learner.params["layers"].items() if "_lora_out_" in n)
        whole = merge(run.policy_config, run.learner.params)[1]
    exported = load_hf(tmp_path / "export", vocab_size=config.vocab_size)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), exported, whole)
    assert load_tokenizer(tmp_path / "export").vocab_size == load_tokenizer(tmp_path / "start").vocab_size
    with pytest.raises(ValueError, match="belongs to another config .*policy.lora_rank: 2 there, 3 here"):
        train(toy(**{**lora, "policy.lora_rank": 3}), tmp_path)
    save_hf(
        tmp_path / "start", config, jax.tree.map(lambda x: x / 2, base), tokenizer=load_tokenizer(tmp_path / "start")
    )
    with pytest.raises(ValueError, match="is not the one that the adapters in .* were trained on"):
        train(toy(**lora), tmp_path)
