"""The supervised start of a policy with random weights: a tokenizer trained in place, then a teacher cloned.

The teacher plays demonstration tasks (from seeds that no split holds) through the same episode machine as the policy,
so a demonstration has the very tokens that the policy will meet. Some are played with cues, so that cues can be read.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from seal_jax import processes
from seal_jax.assembly import Policy, episode_limits, interface_settings, same_ids, sft_settings
from seal_jax.chat.formats import ChatFormat, get_format
from seal_jax.chat.tokenizer import Tokenizer, train_tokenizer
from seal_jax.envs.toolbox import ToolboxSuite
from seal_jax.envs.toolbox.play import CORPUS_FIXED_SHARE, corpus
from seal_jax.envs.toolbox.teacher import Demo, Habits, View, demonstrations
from seal_jax.interface import BARE, Interface, InterfaceSettings, full
from seal_jax.learner.batch import Buckets
from seal_jax.learner.sft import sft_train
from seal_jax.policy.config import PolicyConfig
from seal_jax.policy.copying import wire_for_copying
from seal_jax.policy.model import init_params
from seal_jax.policy.sharding import vocab_parts
from seal_jax.rollout.episode import Episode, Limits, render_prompt
from seal_jax.telemetry.timing import PhaseTimer
from seal_jax.types import Call, CallResult, ErrorKind, ParseError, Segment, Trajectory


def fresh_policy(config: ConfigDict, overrides: dict[str, Any], mesh: Mesh | None, timer: PhaseTimer) -> Policy:
    """A tokenizer trained in place, and random weights."""
    chat, settings = get_format(config.chat), interface_settings(config)
    with timer.phase("tokenizer"):
        texts = [*corpus(chat, seed=config.seed), *cue_texts(settings, config.seed)]
        tokenizer = train_tokenizer(
            texts,
            vocab_size=config.policy.vocab_size,
            special_tokens=chat.special_tokens,
            scaffold=chat.scaffold,
        )
    policy = same_ids(PolicyConfig.tiny(tokenizer.vocab_size, **overrides), tokenizer).padded_to(vocab_parts(mesh))
    processes.agree("the tokenizer", tokenizer.encode("".join(texts[:50])))
    params = init_params(policy, config.seed, mesh)
    if not config.warm_start.enabled:
        logging.warning("config.warm_start.enabled=False with policy.source='tiny': the policy starts from noise")
    elif config.warm_start.wired:
        params = wire_for_copying(policy, params, config.seed)
    return Policy(policy, params, tokenizer, {})


def clone(config: ConfigDict, begun: Policy, mesh: Mesh | None, timer: PhaseTimer) -> Policy:
    """The policy (taken over) after it was trained on a teacher's demonstrations."""
    chat, ws, settings = get_format(config.chat), config.warm_start, interface_settings(config)
    policy, tokenizer = begun.config, begun.tokenizer
    suite = ToolboxSuite(**config.suite_options.to_dict())
    limits = episode_limits(config, max_context=policy.max_position)
    with timer.phase("demonstrations"):
        rng = random.Random(f"warm-start/{config.seed}")
        chosen = demonstrations(
            config.seed,
            ws.demos,
            Habits(**ws.habits.to_dict()),
            fixed_share=ws.fixed_share,
            per_skin=ws.per_skin,
            avoid=suite.user_texts,
            kinds=suite.kinds,
        )
        demos = [
            play_demonstration(demo, chat, tokenizer, limits, random_interface(settings, rng, ws.cued_share))
            for demo in chosen
        ]
        demos = [
            cut(demo, limits.max_suffix_tokens)
            for i in range(0, len(demos), ws.per_skin)
            for demo in share_prompts(by_length(demos[i : i + ws.per_skin]), ws.group)
        ]
    with timer.phase("warm_start"):
        params, metrics = sft_train(
            policy,
            begun.params,
            demos,
            sft_settings(config),
            buckets=Buckets(tuple(config.buckets.prompt), tuple(config.buckets.suffix)),
            mesh=mesh,
            progress=lambda step, total, m: logging.info("warm start %d/%d: nll %.3f", step, total, m["nll"]),
        )
    return Policy(policy, params, tokenizer, {f"warm_start/{k}": v for k, v in metrics.items()})


def play_demonstration(
    demo: Demo, chat: ChatFormat, tokenizer: Tokenizer, limits: Limits, interface: Interface
) -> Trajectory:
    """The teacher's episode as a trajectory; its messages stand as "sampled", with log-prob 0."""
    episode = Episode(
        demo.task,
        demo.suite.open(demo.task),
        chat,
        tokenizer,
        interface,
        limits,
        prompt_ids=render_prompt(demo.task, chat, tokenizer, interface),
        cued=bool(interface.active),
    )
    noted = "spurious_tool_call" in interface.active and bool(interface.note(demo.task.tools))
    while not episode.done:
        before = len(episode.segments)
        episode.take_pending()
        last = episode.last_step
        cued = last is not None and any(s.source == "cue" for s in episode.segments[before:])
        view = View(episode.turn, last.results if last is not None else (), cued, noted)
        reply = demo.teacher.reply(view)
        text = chat.calls(reply.calls) if reply.calls else reply.text
        ids = tokenizer.encode(text + chat.stop_tokens[0])
        episode.receive(ids, (0.0,) * len(ids))
    return episode.trajectory()


def random_interface(settings: InterfaceSettings, rng: random.Random, share: float) -> Interface:
    """Bare, or (with probability `share`) some random cues, so that the policy learns to read any of them."""
    usable = full(settings).active
    most = min(len(usable), settings.max_cues)
    if most == 0 or rng.random() >= share:
        return BARE
    return Interface(active=tuple(rng.sample(usable, rng.randint(1, most))), settings=settings)


def share_prompts(demos: Sequence[Trajectory], group: int) -> list[Trajectory]:
    """Lets `group` demonstrations in a row share a prompt: what their prompts have in common stays the prompt, the rest
    opens the suffix. A row's tokens, and so its loss, do not change; only the work shrinks."""
    shared = []
    for i in range(0, len(demos), group):
        rows = demos[i : i + group]
        n = len(os.path.commonprefix([d.prompt_ids for d in rows]))
        for d in rows:
            rest = (Segment(d.prompt_ids[n:], "user", 0),) if n < len(d.prompt_ids) else ()
            shared.append(replace(d, prompt_ids=d.prompt_ids[:n], segments=rest + d.segments))
    return shared


def by_length(demos: Sequence[Trajectory]) -> list[Trajectory]:
    """Shortest first, so that demonstrations of like length come into a group and little of it is padding."""
    return sorted(demos, key=lambda demo: len(demo.prompt_ids) + len(demo.suffix_ids))


def cut(demo: Trajectory, most: int) -> Trajectory:
    """The whole segments of a demonstration that fit into `most` suffix tokens."""
    lengths = itertools.accumulate(len(segment.ids) for segment in demo.segments)
    return replace(demo, segments=demo.segments[: sum(n <= most for n in lengths)])


def cue_texts(settings: InterfaceSettings, seed: int) -> list[str]:
    """Text with every cue in it, so that the tokenizer has their words."""
    everything = full(settings)
    texts = []
    for demo in demonstrations(seed, 40, fixed_share=CORPUS_FIXED_SHARE):
        tools = demo.task.tools
        call = Call(tools[0]["name"])
        errors: list[CallResult | ParseError] = [
            ParseError(kind, "") for kind in ("json", "unknown_tool", "unavailable_tool")
        ]
        errors += [CallResult(call, "", kind, "id") for kind in get_args(ErrorKind)]
        texts += [everything.note(tools), *(everything.feedback(e, tools) for e in errors)]
    return texts
