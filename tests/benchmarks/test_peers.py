"""The peer comparison without its peers: our contestants run, operations are counted right, the table judges right."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.benchmarks import ours
from experiments.benchmarks.case import CASES, read_case, read_tokens, write_case
from experiments.benchmarks.flops import program_flops, update_flops
from experiments.benchmarks.growth import exponent
from experiments.benchmarks.table import table
from experiments.benchmarks.worker import Failed, Worker

ROOT = Path(__file__).parents[2]
SMALL = replace(CASES["tiny"], layers=1, rollouts=2, prompt=16, response=8)
CASE = replace(CASES["tiny"], layers=2, width=128, heads=4, head_width=32, mlp_width=384, vocab=1024)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers") / "case"
    write_case(SMALL, folder)
    return folder


def accumulate(case, **options):
    """The program of a gradient and its abstract arguments, for this CPU."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    jitted, arguments, _ = ours.update_programs(case, here, **options)["accumulate"]
    return jitted, arguments


def test_a_programs_operations_are_what_xla_counts_where_nothing_loops():
    """Two layers are unrolled and the logits are one chunk: no loop of more than one turn."""
    jitted, arguments = accumulate(CASE)
    xla = jitted.lower(*arguments).cost_analysis()["flops"]
    assert program_flops(jax.make_jaxpr(jitted)(*arguments)) == pytest.approx(xla, rel=0.04)


def test_a_loops_operations_are_counted_as_often_as_it_runs():
    """XLA counts a loop's body once; eight layers, scanned, need four times what two layers need."""
    counted = []
    for layers in (2, 8):
        jitted, arguments = accumulate(replace(CASE, layers=layers))
        counted.append(program_flops(jax.make_jaxpr(jitted)(*arguments)))
    needed = [update_flops(replace(CASE, layers=n), causal=False) for n in (2, 8)]
    assert counted[1] - counted[0] == pytest.approx(needed[1] - needed[0], rel=0.01)


def test_the_formula_is_what_the_program_does_but_for_what_it_does_twice():
    """The program computes whole squares of scores, every place of a row, and its logits twice (remat of the head)."""
    jitted, arguments = accumulate(CASE)
    program = program_flops(jax.make_jaxpr(jitted)(*arguments))
    logits = 2 * CASE.width * CASE.vocab * CASE.rollouts
    formula = update_flops(CASE, causal=False) + logits * CASE.response + 3 * logits
    assert program == pytest.approx(formula, rel=0.02)
    assert update_flops(CASE) < update_flops(CASE, causal=False) < update_flops(CASE, shared=False, causal=False)


def test_a_group_of_one_shares_nothing():
    case = replace(CASE, rollouts=1)
    assert update_flops(case) == update_flops(case, shared=False)


@pytest.mark.parametrize("contestant", [pytest.param("update_block", marks=pytest.mark.slow), "rollout"])
def test_our_contestants_run(contestant, folder, monkeypatch):
    facts, seconds = {}, []

    def serve(step, said):
        facts.update(said)
        seconds.append(step())

    monkeypatch.setattr(ours, "serve", serve)
    ours.CONTESTANTS[contestant](folder)
    assert len(seconds) == 1
    if contestant == "update_block":
        assert facts["gradient_norm"] > 0
        logp = np.load(folder / "logp_ours_block.npy")
        assert logp.shape == (SMALL.rollouts, SMALL.response)
        assert (logp[:, 1:] < 0).all() and (logp[:, 0] == 0).all()


def test_a_case_is_read_as_it_was_written(folder):
    case, tokens = read_case(folder), read_tokens(folder)
    assert case == SMALL
    assert tokens["prompt_ids"].shape == (case.prompt,)
    assert tokens["suffix_ids"].shape == (case.rollouts, case.response)


def worker(code, tmp_path):
    command = ["-c", f"from experiments.benchmarks.worker import serve\n{code}"]
    return Worker(sys.executable, command, tmp_path / "log", {"PYTHONPATH": str(ROOT)})


def test_a_worker_takes_its_turns_and_says_how_long_they_took(tmp_path):
    asked = worker("import time\nprint('noise')\nserve(lambda: time.sleep(0.05), {'fact': 1})", tmp_path)
    assert asked.ready()["fact"] == 1
    assert [asked.step()["seconds"] >= 0.05 for _ in range(2)] == [True, True]
    assert asked.end()["peak_mib"] > 1


def test_a_worker_that_dies_is_told_with_its_last_words(tmp_path):
    asked = worker("def step(): raise RuntimeError('out of luck')\nserve(step, {})", tmp_path)
    asked.ready()
    with pytest.raises(Failed, match="ended with code 1: RuntimeError: out of luck"):
        asked.step()


def test_the_exponent_is_that_of_a_power():
    assert exponent([1, 2, 4], [3, 6, 12]) == pytest.approx(1)
    assert exponent([1, 2, 4], [5, 20, 80]) == pytest.approx(2)


def found(**changes):
    """A file's contents: ours takes 1 and 2 s, tunix 3 and 6 s, dot needs one for all operations."""
    needed = update_flops(CASES["tiny"]) / 1e9
    update = {
        "ours_none": {
            "steps": [{"seconds": 1.0}, {"seconds": 2.0}],
            "peak_mib": 512.0,
            "logp_difference": 1e-6,
            "gradient_norm": 6.0,
        },
        "tunix": {
            "steps": [{"seconds": 3.0}, {"seconds": 6.0}],
            "peak_mib": 1000.0,
            "gradient_norm": 6.0,
        },
        "matmul": {"steps": [{"seconds": 1.0, "gflops_square": needed}] * 2},
    }
    update["ours_none"] |= changes
    generate = {
        "ours": {"steps": [{"seconds": 1.0}], "peak_mib": 100.0},
        "transformers": {"steps": [{"seconds": 1.5}], "peak_mib": 100.0},
    }
    aot = {
        "tiny ours_none": {"flops": 1e12, "xla_bytes": 1e9, "peak_gib": 1.0},
        "tiny tunix_block": {"flops": 4e12, "too_large_gib": 150.0, "chip_gib": 95.7},
    }
    growth = {"turns": {"sizes": [1, 2], "seconds": {"update": [1.0, 2.0]}, "exponents": {"update": 1.0}}}
    parts = {"update": update, "generate": generate, "aot": aot, "growth": {"growth": growth}}
    return {"shape": "tiny", "host": {"cpus": 2, "system": "Linux"}, "parts": parts}


def row(text, start):
    return next([c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if start in line)


def test_the_table_judges_each_target():
    text = table(json.loads(json.dumps(found())))
    tokens = CASES["tiny"].row_tokens
    assert row(text, "row-tokens/s |")[1:] == [
        f"{tokens / 1.5:.0f}", f"tunix {tokens / 4.5:.0f}", "3.00x", ">= 2.5x", "yes",
    ]  # fmt: skip
    assert row(text, "update, remat none: peak GiB")[3:] == ["0.51x", "<= 0.5x", "no"]
    assert row(text, "beside jnp.dot")[3:] == ["0.75x", ">= 0.5x", "yes"]  # of 1 and 0.5
    assert row(text, "the same?")[-1] == "yes"
    assert row(text, "generate: sampled")[3:] == ["1.50x", ">= 1x", "yes"]
    assert row(text, "remat none: TFLOP")[1:4] == ["1", "tunix 4", "0.25x"]
    assert row(text, "v5p, remat none: peak")[2] == "tunix 150 (chip: 95.7)"
    assert row(text, "| turns")[1:] == ["update", "1: 1, 2: 2", "1.00"]


def test_the_table_voids_a_comparison_of_different_computations():
    assert row(table(found(logp_difference=0.1)), "the same?")[-1] == "no: VOID"
    assert row(table(found(gradient_norm=6.1)), "the same?")[-1] == "no: VOID"


def test_a_contestant_that_failed_is_told():
    of = found()
    of["parts"]["update"]["tunix"] = {"failed": "ended with code -9"}
    assert "update/tunix failed: ended with code -9" in table(of)


def test_peers_asks_for_the_peers_python():
    command = [sys.executable, "-m", "experiments.benchmarks.peers", "--only=update"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--peer_python=PYTHON is needed" in done.stderr
