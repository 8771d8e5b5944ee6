"""One process of several, for tests/test_processes.py: `python one_of_many.py JOB PORT COUNT INDEX FOLDER`.

JOB: "learn" does what a round does with toys and leaves what it got in FOLDER/INDEX.json; "die" loses its last process
while the others wait for it; "fail" has its first process fail by itself.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from seal_jax import processes
from seal_jax.learner.batch import make_batch
from seal_jax.learner.loss import LossSettings
from seal_jax.learner.optimizer import OptimizerSettings
from seal_jax.learner.update import Learner, UpdateSettings
from seal_jax.learner.utility import utility_vector
from seal_jax.policy.local import LocalCopies, spans_processes
from seal_jax.policy.sharding import make_mesh, put, to_host
from seal_jax.types import LABELS, Call, CallResult, Step, Trajectory, Unevaluated
from tests.learner.toys import BUCKETS, diagnosis, simple, toy_logp, toy_params

#: Where the toy model's parameters are split; its width is 8.
SPECS = {"embed_vd": (None, "fsdp"), "mix_dd": ("fsdp",), "head_dv": ("fsdp",)}


def episodes(groups: slice) -> list[list[Trajectory]]:
    """The same groups of four in any process; each holds calls that plain JSON would change."""
    call = Call("f", {"x": Unevaluated("nan"), "y": (1, [2.5, None]), "z": "\ud800"}, (True,))
    steps = ((Step("text", (call,), None, (CallResult(call, "22.0"),)),),)
    out = []
    for b in range(8)[groups]:
        rows = [simple(3 + (b + 2 * g) % 5, f"t{b}", g, seed=10 * b + g) for g in range(4)]
        out.append([Trajectory(**{**vars(x), "turns": steps, "prompt_ids": (1, 2, 3 + b)}) for x in rows])
    return out


def learn(mesh_shape: tuple[int, int, int]) -> dict:
    """Two updates of two mini-batches on eight groups, with a KL; the parameters that the players would get."""
    everyones = processes.exchange(episodes(processes.share(8)))
    rewards = [[float((b * g + b) % 3 == 0) for g in range(4)] for b in range(8)]
    labels = [[diagnosis(LABELS[(b + g) % 8], LABELS[g]) for g in range(4)] for b in range(8)]
    batch = make_batch(everyones, rewards, labels, buckets=BUCKETS)
    mesh = None if mesh_shape == (1, 1, 1) else make_mesh(mesh_shape)
    params = toy_params(width=8)
    if mesh is not None:
        params = {k: put(np.asarray(x), NamedSharding(mesh, PartitionSpec(*SPECS[k]))) for k, x in params.items()}
    learner = Learner(
        None,
        params,
        buckets=BUCKETS,
        mesh=mesh,
        loss=LossSettings(reweight="turn", kl_coef=0.1, normalize_weights=True),
        optimizer=OptimizerSettings(learning_rate=1e-2),
        update=UpdateSettings(minibatches=2, prompts_per_micro=4),
        logp_fn=toy_logp,
    )
    local = LocalCopies(mesh) if spans_processes(mesh) else lambda params: params
    metrics = [learner.update(batch, round=t, utility_z=utility_vector({})) for t in (1, 2)]
    played_with = local(learner.params)
    assert all(x.is_fully_addressable for x in jax.tree.leaves(played_with))
    for mine, everyones_own in zip(jax.tree.leaves(played_with), jax.tree.leaves(learner.params), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), to_host(everyones_own))
    return {
        "episodes": repr(everyones),
        "metrics": [{k: v for k, v in m.items() if not k.startswith(("seconds", "compilations"))} for m in metrics],
        "params": [np.asarray(x).ravel().tolist() for x in jax.tree.leaves(played_with)],
    }


def main(job: str, port: str, count: str, index: str, folder: str) -> None:
    processes.join(f"127.0.0.1:{port}", int(count), int(index))
    last = int(index) == int(count) - 1
    with processes.together(folder):
        if job == "learn":
            processes.check_shared(Path(folder))
            got = learn((1, jax.device_count(), 1))
            processes.agree("this", got["episodes"])
            try:
                processes.agree("the index", index)
            except RuntimeError as error:
                got["apart"] = str(error)
            (Path(folder) / index).mkdir()
            try:
                processes.check_shared(Path(folder) / index)
            except ValueError as error:
                got["unshared"] = str(error)
            (Path(folder) / f"{index}.json").write_text(json.dumps(got))
        processes.agree("the start", job)
        if job == "die" and last:
            os.kill(os.getpid(), 9)
        if job == "fail" and not last:
            raise FloatingPointError("the loss is nan")
        processes.agree("the end", job)


if __name__ == "__main__":
    main(*sys.argv[1:])
