"""Builds the parts of a run from its config: suite, tokenizer, policy, collector, learner.

Everything that can be refused is refused here, before anything compiles.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from seal_jax import processes
from seal_jax.chat.formats import get_format
from seal_jax.chat.official import DECODER_OF_CHAT
from seal_jax.chat.official_formats import WireTexts, official_format
from seal_jax.chat.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf
from seal_jax.config import lookup
from seal_jax.envs.base import Suite, make_suite
from seal_jax.evaluation.results import REGISTERED
from seal_jax.files import read_object, write_whole
from seal_jax.interface import Interface, InterfaceSettings, full
from seal_jax.learner.batch import Buckets
from seal_jax.learner.loss import LossSettings
from seal_jax.learner.optimizer import OptimizerSettings
from seal_jax.learner.sft import SftSettings
from seal_jax.learner.update import Learner, UpdateSettings
from seal_jax.learner.utility import utility_vector
from seal_jax.policy.config import Params, PolicyConfig
from seal_jax.policy.gguf import load_gguf
from seal_jax.policy.hf import load_hf, save_hf
from seal_jax.policy.local import local_shape
from seal_jax.policy.lora import add_adapters
from seal_jax.policy.sharding import make_mesh, param_shardings, vocab_parts
from seal_jax.policy.splash import LANES
from seal_jax.rollout.collector import Collector, batches
from seal_jax.rollout.engine import RolloutEngine
from seal_jax.rollout.episode import Limits, official_limits, render_prompt
from seal_jax.telemetry.timing import PhaseTimer
from seal_jax.types import Task

#: Beside the weights of a cloned policy: steps, seconds and closing loss of its warm start.
WARM_START_FILE = "warm_start.json"


@dataclass(frozen=True)
class Policy:
    """A starting policy and what it reads and writes with."""

    config: PolicyConfig
    params: Params
    tokenizer: Tokenizer
    metrics: dict[str, float]  # of the warm start; empty without one


def build_mesh(config: ConfigDict) -> Mesh | None:
    """The device mesh, of all processes; None for a single device, where every sharding is trivial. Refuses what it
    cannot split.
    """
    shape, n_processes = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor), processes.count()
    if shape == (1, 1, 1) and n_processes == 1:
        return None
    mesh = make_mesh(shape)
    check_mesh(config, mesh, jax.device_count(), n_processes)
    return mesh


def check_mesh(config: ConfigDict, mesh: Mesh, n_devices: int, n_processes: int) -> None:
    """ValueError for what does not divide over a mesh of some of `n_devices` devices of `n_processes` processes."""
    shape = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    if n_processes > 1 and mesh.size != n_devices:
        raise ValueError(
            f"config.mesh={shape} takes {mesh.size} of the {n_devices} devices of {n_processes} processes; "
            "each has to train with all of its own; set config.mesh.data=-1 or config.mesh.fsdp=-1"
        )
    if config.tasks_per_round % n_processes:
        raise ValueError(
            f"config.tasks_per_round={config.tasks_per_round} does not divide over {n_processes} processes; use a "
            f"multiple of {n_processes}"
        )
    ways = mesh.shape["data"] * mesh.shape["fsdp"]  # known only now: a size of -1 is whatever devices are left
    data, fsdp, _ = local_shape(mesh)  # where a process plays
    for name, n, whose in (
        ("learner.prompts_per_micro", ways, ""),
        ("buckets.groups", data * fsdp, "" if n_processes == 1 else " of each process"),
    ):
        value = lookup(config, name)
        if np.any(np.array(value) % n):
            mend = f"multiples of {n}" if isinstance(value, tuple) else f"a multiple of {n}"
            raise ValueError(
                f"config.{name}={value} does not divide over data x fsdp = {n} devices{whose} (config.mesh={shape}); "
                f"use {mend} or a smaller mesh"
            )


def build_suite(config: ConfigDict) -> Suite:
    return make_suite(config.suite, **config.suite_options.to_dict())


def interface_settings(config: ConfigDict) -> InterfaceSettings:
    loop = ("exposure", "anneal_rounds", "strip_in_update", "closed_loop", "profile_rate")  # of the loop, not of Ω
    return InterfaceSettings.from_dict({k: v for k, v in config.interface.to_dict().items() if k not in loop})


def check_settings(config: ConfigDict) -> None:
    """ValueError for a setting that a part of the run refuses: here, not after the weights are loaded."""
    learner_settings(config)
    if config.warm_start.enabled:
        sft_settings(config)
    episode_limits(config)
    interface_settings(config)
    check_overlap(config)
    utility_vector(config.loss.utility.to_dict())


def check_overlap(config: ConfigDict) -> None:
    """ValueError if the tasks of a round cannot be halved: the setting would do nothing."""
    groups = config.buckets.groups
    wave = min(config.tasks_per_round // processes.count(), groups[-1])
    if config.overlap_environment and config.rounds and len(batches(wave, groups, halve=True)) == 1:
        raise ValueError(
            f"config.overlap_environment=True plays two halves, but config.buckets.groups={tuple(groups)} cannot hold "
            f"{wave} tasks as two halves in no more places; add {(wave + 1) // 2} to it, or set it to False"
        )


def learner_settings(config: ConfigDict) -> dict[str, Any]:
    """The `loss`, `optimizer` and `update` arguments of the learner."""
    update = UpdateSettings(**config.learner.to_dict(), temperature=config.temperature, seed=config.seed)
    # A cosine ends with the run. (Where rounds is 0 nothing is trained, and any number will do.)
    steps = config.rounds * update.minibatches * update.epochs or config.optimizer.warmup_steps + 1
    return {
        "loss": LossSettings(
            **{k: v for k, v in config.loss.to_dict().items() if k not in ("utility", "shuffle_labels")}
        ),
        "optimizer": OptimizerSettings(**config.optimizer.to_dict(), total_steps=steps),
        "update": update,
    }


def sft_settings(config: ConfigDict) -> SftSettings:
    names = ("epochs", "group", "rows_per_step", "learning_rate", "other_weight")
    return SftSettings(**{name: config.warm_start[name] for name in names}, seed=config.seed)


def episode_limits(config: ConfigDict, **options: Any) -> Limits:
    return Limits(max_suffix_tokens=config.buckets.suffix[-1], **config.limits.to_dict(), **options)


def policy_overrides(config: ConfigDict, platform: str) -> dict[str, Any]:
    """The fields of PolicyConfig that the run decides and not the checkpoint, on "cpu", "gpu" or "tpu"."""
    attention = config.policy.attention
    if attention == "auto":
        fits = all(size % LANES == 0 for name in ("prompt", "suffix") for size in config.buckets[name])
        attention = "splash" if platform == "tpu" and fits else "blockwise"
    if attention == "splash" and platform != "tpu":
        raise ValueError(
            f"config.policy.attention='splash' is a kernel for TPUs and this is a {platform}; set it to 'auto'"
        )
    return {
        **config.policy.overrides.to_dict(),
        "compute_dtype": config.policy.compute_dtype,
        "remat": config.policy.remat,
        "head_chunk": config.policy.head_chunk,
        "attention": attention,
        "lora_rank": config.policy.lora_rank,
        "lora_alpha": config.policy.lora_alpha,
    }


def starting_policy(config: ConfigDict, workdir: Path, mesh: Mesh | None, timer: PhaseTimer) -> Policy:
    """Weights and tokenizer of round 0: loaded, or made and kept in workdir/start for a resume."""
    overrides = policy_overrides(config, jax.default_backend())
    loading = {"vocab_parts": vocab_parts(mesh), "seed": config.seed, **overrides}
    shardings = None if mesh is None else lambda policy: param_shardings(policy, mesh)
    start = workdir / "start"
    if config.policy.source == "gguf":
        policy, params = load_gguf(config.policy.path, shardings=shardings, **loading)
        tokenizer = tokenizer_from_gguf(config.policy.path)
        return Policy(same_ids(policy, tokenizer), params, tokenizer, {})

    def load(source: str | Path, **options: Any) -> Policy:
        policy, params = load_hf(source, shardings=shardings, **{**loading, **options})
        tokenizer = load_tokenizer(source)
        return Policy(same_ids(policy, tokenizer), params, tokenizer, warm_start_metrics(Path(source)))

    if config.policy.source == "hf" and not config.warm_start.enabled:
        return load(config.policy.path)
    # (Process 0 looks for all: it may be making the folder while another one looks.)
    if processes.told_by_first(start.exists()):
        return load(start)
    from seal_jax.warm_start import clone, fresh_policy  # only the toolbox has a teacher

    if config.policy.source == "hf":
        made = load(config.policy.path, lora_rank=0)
    else:
        made = fresh_policy(config, {**overrides, "lora_rank": 0}, mesh, timer)
    if config.warm_start.enabled:
        made = clone(config, made, mesh, timer)
    save_hf(start, made.config, made.params, tokenizer=made.tokenizer)
    if processes.first():
        write_whole(start / WARM_START_FILE, json.dumps(made.metrics, indent=1) + "\n")
    if not config.policy.lora_rank:
        return made
    # The warm start trains the whole of a small policy, the rounds its adapters.
    rank, alpha = config.policy.lora_rank, config.policy.lora_alpha
    policy, params = add_adapters(made.config, made.params, rank=rank, alpha=alpha, seed=config.seed, mesh=mesh)
    return replace(made, config=policy, params=params)


def same_ids(policy: PolicyConfig, tokenizer: Tokenizer) -> PolicyConfig:
    """The policy with the ids of the tokenizer and no others: any further rows of its head are masked as padding, in
    sampling and in training."""
    if policy.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids but the policy only {policy.vocab_size}: they belong to "
            "different models, or config.policy.overrides.vocab_size is too small"
        )
    return replace(policy, vocab_size=tokenizer.vocab_size)


def warm_start_metrics(folder: Path) -> dict[str, float]:
    """What the warm start that made this folder reported; empty for weights from elsewhere."""
    path = folder / WARM_START_FILE
    return read_object(path, "remove it: only what the warm start cost is in it") if path.exists() else {}


def build_collector(
    config: ConfigDict, policy: Policy, suite: Suite, mesh: Mesh | None, timer: PhaseTimer
) -> Collector:
    chat, tokenizer = get_format(config.chat), policy.tokenizer
    limits = episode_limits(config, max_context=policy.config.max_position)
    engine = RolloutEngine(
        policy.config,
        stop_ids=[tokenizer.token_id(t) for t in chat.stop_tokens],
        prompt_buckets=config.buckets.prompt,
        suffix_buckets=config.buckets.suffix[-1:] if config.buckets.act_in_last else config.buckets.suffix,
        chunk_buckets=config.buckets.chunk,
        group_buckets=config.buckets.groups,
        row_buckets=config.buckets.rows,
        max_new_tokens=config.limits.max_new_tokens,
        decode_size=config.buckets.decode,
        mesh=mesh,
    )
    return Collector(engine, suite, chat, tokenizer, limits, config.seed, timer, config.overlap_environment)


def official_collector(config: ConfigDict, collector: Collector, context: int) -> Collector:
    """The same engine and tasks, but episodes as bfcl-eval plays them with a policy of `context` positions, and calls
    as it executes them."""
    from seal_jax.envs.bfcl import package  # only who asks for it needs bfcl-eval

    # The name is part of the quirks: that of the folder in which the episodes are handed to the package.
    named = REGISTERED[DECODER_OF_CHAT[config.chat]]
    suite = make_suite(config.suite, **{**config.suite_options.to_dict(), "official_quirks": named})
    texts = WireTexts(package.language_hint(package.package_folder()), package.prompting_system_prompt())
    limits = official_limits(
        context=context,
        max_suffix_tokens=config.buckets.suffix[-1],
        max_new_tokens=config.limits.max_new_tokens,
    )
    return replace(collector, suite=suite, chat=official_format(config.chat, texts), limits=limits)


def build_learner(config: ConfigDict, policy: Policy, mesh: Mesh | None, *, turns: int) -> Learner:
    """Takes over `policy.params`: they are donated by the first update."""
    return Learner(
        policy.config,
        policy.params,
        buckets=Buckets(tuple(config.buckets.prompt), tuple(config.buckets.suffix), turns),
        frozen=config.rounds == 0,
        mesh=mesh,
        **learner_settings(config),
    )


def split_tasks(config: ConfigDict, suite: Suite, split: str) -> Sequence[Task]:
    """The tasks of an evaluated split: config.eval.<split> of them (-1: all), of one category if config.eval.category.

    A part of a split has its categories in equal numbers, and their domains (as far as they go).
    """
    wanted = config.eval[split]
    if wanted == 0:
        return ()
    if not suite.tasks(split):
        raise ValueError(
            f"config.eval.{split}={wanted} but the suite has no task in split {split!r} (config.suite_options="
            f"{config.suite_options.to_dict()}); set config.eval.{split}=0 or let the split have tasks"
        )
    tasks = [t for t in suite.tasks(split) if config.eval.category in ("", t.category)]
    if not tasks:
        raise ValueError(f"config.eval.category={config.eval.category!r} has no task in split {split!r}")
    if wanted > len(tasks):
        raise ValueError(f"config.eval.{split}={wanted} but there are {len(tasks)} such tasks; lower it or use -1")
    return tasks if wanted < 0 else balanced(tasks, wanted)


def cued_tasks(config: ConfigDict, test: Sequence[Task]) -> Sequence[Task]:
    """The test tasks that are evaluated with cues too: config.eval.cued_tasks of those that are evaluated at all."""
    wanted = config.eval.cued_tasks
    if not config.eval.cued or not test:
        return ()
    if wanted > len(test):
        raise ValueError(
            f"config.eval.cued_tasks={wanted} but {len(test)} test tasks are evaluated; lower it or use -1"
        )
    return test if wanted < 0 else balanced(test, wanted)


def balanced(tasks: Sequence[Task], wanted: int) -> list[Task]:
    """`wanted` of the tasks, in their order. Categories take turns, and each gives a task of a scenario that was taken
    least so far (tasks of one scenario are solved or failed together), of those one of its domain taken least.

    (Every n-th task would not do for any n: suites put categories and domains in a regular order.)
    """
    left: dict[str, list[int]] = {}
    for i, task in enumerate(tasks):
        left.setdefault(task.category, []).append(i)
    taken: Counter[Hashable] = Counter()
    chosen: list[int] = []
    while len(chosen) < wanted:
        for category in [c for c in left if left[c]][: wanted - len(chosen)]:
            best = min(left[category], key=lambda i: (taken[tasks[i].scenario], taken[_place(tasks[i])], i))
            left[category].remove(best)
            taken.update((tasks[best].scenario, _place(tasks[best])))
            chosen.append(best)
    return [tasks[i] for i in sorted(chosen)]


def _place(task: Task) -> Hashable:
    return task.category, task.domains


def check_prompts(config: ConfigDict, tasks: Sequence[Task], collector: Collector) -> int:
    """Longest prompt in tokens; ValueError if one does not fit, before an hour of work rather than after it."""
    chat, tokenizer, context = collector.chat, collector.tokenizer, collector.limits.max_context
    shown: Interface = full(interface_settings(config))
    opening = len(tokenizer.encode(chat.assistant_open))
    if opening + config.limits.max_new_tokens > config.buckets.suffix[-1]:
        raise ValueError(
            f"config.buckets.suffix[-1]={config.buckets.suffix[-1]} has no room for one message: {opening} tokens of "
            f"template and config.limits.max_new_tokens={config.limits.max_new_tokens}; add a larger suffix bucket"
        )
    longest = 0
    for task in tasks:
        n = len(render_prompt(task, chat, tokenizer, shown))
        if n > config.buckets.prompt[-1]:
            raise ValueError(
                f"task {task.id!r}: its prompt has {n} tokens, more than config.buckets.prompt[-1]="
                f"{config.buckets.prompt[-1]}; add a larger prompt bucket"
            )
        if n + opening >= context:
            raise ValueError(
                f"task {task.id!r}: its prompt has {n} tokens and leaves no room for an answer in the policy's context "
                f"of {context}; choose a policy with a longer one"
            )
        longest = max(longest, n)
    logging.info("%d prompts, the longest has %d tokens", len(tasks), longest)
    return longest
