"""Every setting of a run, its default and its meaning; and the checks that run before anything compiles.

A recipe in `configs/` starts from `default_config()` and changes what it must. The config is locked: an unknown key is
an error, except in the mappings of `OPEN`. `validate` refuses contradictory values with one line that names the field,
the value and the mend.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from ml_collections import ConfigDict

from seal_jax.chat.official import DECODER_OF_CHAT
from seal_jax.envs.toolbox.teacher import Habits
from seal_jax.types import FAILURE_LABELS, PROTOCOLS

REWEIGHTS = ("none", "paper", "release", "turn")
REWARDS = ("success", "progress")
#: The splits that a run reports and decides nothing by, in this order. What one has played, the next does not replay.
REPORTED = ("test", "eval", "ood")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean")
#: Mappings that take any key here; the part of the run that they are for checks them.
OPEN = ("suite_options", "policy.overrides", "interface.activate", "interface.retire", "loss.utility")


def default_config() -> ConfigDict:
    c = ConfigDict()
    c.seed = 0  # of everything random in the run: sampling, task order, warm start
    c.rounds = 10  # closed-loop rounds; one round = rollouts, diagnosis, update, Evolve
    c.tasks_per_round = 16  # B, prompts of a round
    c.rollouts = 8  # G, trajectories per prompt (paper: 8)
    c.temperature = 1.0  # of sampling in training; evaluation is greedy
    c.reward = "success"  # of training: "success" (the verifier's 0/1), or "progress" (share of turns passed)
    c.stop_failed_turns = False  # end a training episode at its first failed turn; later ones count as not passed
    # Play two half-batches in turns, so that the worlds of one answer while an accelerator decodes the other. Halves
    # need group buckets of their own. On a CPU, where both want the same cores, nothing is gained.
    c.overlap_environment = False

    c.suite = "toolbox"  # "toolbox" (embedded) or "bfcl" (needs the pinned bfcl-eval wheel)
    c.suite_options = ConfigDict()  # passed to the suite's constructor
    c.chat = "tiny"  # chat format: "tiny", "hermes", "llama31", "toolace"

    c.policy = ConfigDict()
    c.policy.source = "tiny"  # "tiny" (random weights), "hf" (folder or hub id), "gguf" (file)
    c.policy.path = ""  # for "hf" and "gguf"
    c.policy.overrides = ConfigDict()  # fields of PolicyConfig to change, e.g. d_model of "tiny"
    c.policy.compute_dtype = "float32"  # "bfloat16" on TPU/GPU; master weights are float32 always
    c.policy.remat = "none"  # "none" or "block": recompute each block in the backward pass
    c.policy.head_chunk = 512  # positions whose logits exist at once
    c.policy.attention = "auto"  # "blockwise", "splash" (a fused TPU kernel), or "auto": splash on TPUs
    # Rank of an adapter (LoRA) beside every projection; only adapters are then trained and saved. 0 = train everything.
    c.policy.lora_rank = 0
    c.policy.lora_alpha = 16.0  # adapters count lora_alpha / lora_rank
    c.policy.vocab_size = 1280  # of the tokenizer trained in place (source == "tiny")

    # Devices as data x fsdp x tensor; -1 = whatever is left. Every axis must divide what it shards.
    c.mesh = ConfigDict({"data": 1, "fsdp": 1, "tensor": 1})

    # The only shapes that are ever compiled. More buckets waste less, fewer compile less.
    c.buckets = ConfigDict()
    c.buckets.prompt = (512,)  # tokens of tools + system + first user message
    c.buckets.suffix = (128, 256, 512)  # tokens after the prompt; the last is the hard limit of an episode
    c.buckets.act_in_last = False  # act with the last suffix size only: fewer programs to compile, more padding
    c.buckets.chunk = (16, 64)  # tokens fed between two messages (observation, next user turn)
    c.buckets.decode = 512  # tokens sampled by one device call; a longer message takes several
    c.buckets.groups = (1, 2, 4, 8, 16)  # prompts per device call
    c.buckets.rows = ()  # rows of a prompt, beside `rollouts`, that live rows may be packed into as others finish

    c.limits = ConfigDict()
    c.limits.max_new_tokens = 48  # per assistant message
    c.limits.max_steps_per_turn = 8
    c.limits.max_steps = 20  # per episode (paper: 20)
    c.limits.max_observation_tokens = 256
    c.limits.retry_malformed = True
    c.limits.enforce_available = True

    c.interface = ConfigDict()
    c.interface.exposure = 0.5  # share of each group's rows that see cues; 1.0 = the paper, 0.0 = no environment side
    c.interface.anneal_rounds = 0  # rounds in which the exposure falls to 0, evenly; 0 = it stays as it is
    c.interface.strip_in_update = False  # train cued successes with their cues removed; drop cued failures
    c.interface.components = ("schema", "err", "cap")  # of Eq. 9
    c.interface.schema_parts = ("required", "type", "values", "format")  # what φ_schema says about an argument
    c.interface.placement = "note"  # "note" opens the suffix; "inline" stands in the tool docs (paper)
    c.interface.closed_loop = True  # False: Ω is frozen after the first profile
    c.interface.profile_rate = 0.5  # EMA rate of the profile
    c.interface.activate = ConfigDict()  # per label: rate at which its cue comes (default 0.08 each)
    c.interface.retire = ConfigDict()  # per label: rate under which its cue goes (default 0.04 each)
    c.interface.min_rounds = 2  # a cue is shown at least this long
    c.interface.min_count = 4  # turns with the label in the last round, without which a cue does not come
    c.interface.max_cues = 3  # active at once
    c.interface.max_tools = 12  # tools that a cue lists before it says "and others"
    c.interface.feedback = "plain"  # one text per kind of error; "classed" tells also the class of a refusal
    c.interface.pinned = ()  # labels whose cue is always on (ablations)

    c.loss = ConfigDict()
    c.loss.reweight = "paper"  # "none" (plain GRPO), "paper" (Eq. 10-12), "release" (dynamic tag weights), "turn"
    c.loss.w_min, c.loss.w_max = 0.5, 2.0
    c.loss.clip_low, c.loss.clip_high = 0.2, 0.2
    c.loss.dual_clip = 10.0
    c.loss.kl_coef = 0.001  # k3 estimator to the frozen starting policy; 0 = no reference forward at all
    c.loss.aggregation = "token-mean"
    c.loss.sign_aware = False  # a failure label scales only negative advantages, a success label only positive ones
    c.loss.normalize_weights = False  # rescale the weights so that they leave the sum of |advantages| as it is
    c.loss.shuffle_labels = False  # deal the labels out at random: weights that know nothing (ablation)
    c.loss.utility = ConfigDict()  # rho per label, where it differs from the default table

    c.optimizer = ConfigDict()
    c.optimizer.learning_rate = 1e-6
    c.optimizer.schedule = "constant"  # or "cosine": falls to 0 at the run's last step (more rounds stretch it)
    c.optimizer.warmup_steps = 0
    c.optimizer.b1, c.optimizer.b2 = 0.9, 0.999
    c.optimizer.weight_decay = 0.01
    c.optimizer.clip_norm = 1.0
    c.learner = ConfigDict()
    c.learner.minibatches = 4  # optimiser steps per round, over disjoint prompts
    c.learner.epochs = 1  # passes over a round's batch
    c.learner.prompts_per_micro = 1  # prompts whose activations exist at once
    c.learner.skip_zero_advantage = True  # groups of equal reward contribute exactly 0 when kl_coef is 0: skip them

    c.warm_start = ConfigDict()  # supervised start, from random weights ("tiny") or from those of a folder ("hf")
    c.warm_start.enabled = False
    c.warm_start.wired = True  # attention heads that can copy from the first step (policy/copying.py)
    c.warm_start.demos = 21600  # demonstrations of the teacher
    c.warm_start.per_skin = 16  # of them have the same tools
    c.warm_start.group = 4  # of these, alike in length, share the computation of their docs
    c.warm_start.fixed_share = 0.75  # demonstrations in the training domains; the rest in random skins
    c.warm_start.cued_share = 0.3  # demonstrations in which cues are shown
    c.warm_start.epochs = 2
    c.warm_start.rows_per_step = 16
    c.warm_start.learning_rate = 2e-3
    c.warm_start.other_weight = 0.1  # loss weight of the tokens that are not the assistant's
    c.warm_start.habits = ConfigDict(asdict(Habits()))  # how often the teacher does the wrong thing

    c.eval = ConfigDict()
    c.eval.every = 0  # rounds between validations, on val; 0 = none. The others: after training
    # Tasks of each split evaluated; 0 = skip it, -1 = all. BFCL's eval is val and test together, the paper's 400.
    c.eval.val, c.eval.test, c.eval.eval, c.eval.ood = 0, 0, 0, 0
    c.eval.before = True  # evaluate the reported splits before training too, to compare
    # Labels whose cues are shown in one more evaluation of test, "test_cued": how much a policy leans on them. No
    # score: the interface is gone at evaluation. () = leave it out.
    c.eval.cued = ()
    c.eval.cued_tasks = -1  # of test, in that evaluation; -1 = all that are evaluated
    c.eval.category = ""  # evaluate only this category of each split; "" = all
    # How evaluated episodes are played: "seal" (as in training: config.limits) or "official" (as
    # the benchmark's own package does). Reports play all of them, validation the first.
    c.eval.protocols = ("seal",)

    c.checkpoint = ConfigDict({"every": 5, "keep": 2})
    c.trajectories_logged = 8  # per round, written whole to trajectories/
    c.lock()
    for key in OPEN:
        lookup(c, key).unlock()
    return c


def validate(config: ConfigDict) -> None:
    """Raises ValueError, one line, on the first value that cannot work. Needs no device and compiles nothing."""
    check_types(config, default_config())
    at_least(config, "rounds", 0)
    for key in ("tasks_per_round", "learner.minibatches", "checkpoint.every", "checkpoint.keep"):
        at_least(config, key, 1)
    at_least(config, "eval.every", 0)
    at_least(config, "buckets.decode", 1)
    at_least(config, "policy.lora_rank", 0)
    if config.policy.lora_alpha <= 0:
        raise ValueError(f"config.policy.lora_alpha={config.policy.lora_alpha} must be above 0, e.g. the rank")
    for split in ("val", *REPORTED, "cued_tasks"):
        at_least(config, f"eval.{split}", -1)
    if config.eval.every and not config.eval.val:
        raise ValueError(
            f"config.eval.every={config.eval.every} validates on val, but config.eval.val=0; "
            "set config.eval.val=-1, or config.eval.every=0"
        )
    if not (config.rounds or any(config.eval[split] for split in ("val", *REPORTED))):
        raise ValueError("config.rounds=0 and no split is evaluated: nothing to do; set config.rounds or eval.test=-1")
    if not (config.rounds or config.eval.before):
        raise ValueError(
            "config.rounds=0 and config.eval.before=False: nothing to do; set config.rounds or config.eval.before=True"
        )
    if config.rollouts < 2:
        raise ValueError(
            f"config.rollouts={config.rollouts}: a group advantage needs at least 2 rollouts; set config.rollouts=8"
        )
    if config.temperature <= 0:
        raise ValueError(f"config.temperature={config.temperature}: training samples, so it must be > 0; set it to 1.0")
    one_of(config, "chat", ("tiny", "hermes", "llama31", "toolace"))
    one_of(config, "policy.source", ("tiny", "hf", "gguf"))
    one_of(config, "policy.compute_dtype", ("float32", "bfloat16"))
    one_of(config, "policy.remat", ("none", "block"))
    one_of(config, "policy.attention", ("auto", "blockwise", "splash"))
    one_of(config, "loss.reweight", REWEIGHTS)
    one_of(config, "reward", REWARDS)
    one_of(config, "loss.aggregation", AGGREGATIONS)
    one_of(config, "interface.placement", ("note", "inline"))
    check_protocols(config)
    check_cued(config)
    if config.policy.source != "tiny" and not config.policy.path:
        raise ValueError(
            f"config.policy.path is empty but config.policy.source={config.policy.source!r}; "
            "set it to a folder, hub id or .gguf file (--config.policy.path=...)"
        )
    if config.loss.reweight == "release" and config.loss.utility:
        raise ValueError(
            "config.loss.utility has no effect with config.loss.reweight='release', whose weights are learned; "
            "leave it empty, or set config.loss.reweight='paper'"
        )
    exposure = config.interface.exposure
    if not 0.0 <= exposure <= 1.0:
        raise ValueError(f"config.interface.exposure={exposure} is a share of each group; set it between 0.0 and 1.0")
    cued = round(exposure * config.rollouts)  # as rollout.collector.cued_rows counts them
    if 0.0 < exposure < 1.0 and cued in (0, config.rollouts):
        raise ValueError(
            f"config.interface.exposure={exposure} of {config.rollouts} rollouts is {cued} cued rows, a share of "
            f"{cued / config.rollouts}; set it to {cued / config.rollouts} or nearer to 0.5, or raise config.rollouts"
        )
    at_least(config, "interface.anneal_rounds", 0)
    if config.interface.anneal_rounds and config.interface.placement == "inline":
        raise ValueError(
            "config.interface.placement='inline' puts cues into the prompt that a whole group shares, so no share of "
            f"its rows can lose them over config.interface.anneal_rounds={config.interface.anneal_rounds}; set "
            "anneal_rounds=0 or placement='note'"
        )
    if config.loss.shuffle_labels and config.loss.reweight != "paper":
        raise ValueError(
            f"config.loss.shuffle_labels=True is for the weights of whole trajectories, but config.loss.reweight="
            f"{config.loss.reweight!r}; set config.loss.reweight='paper'"
        )
    rate = config.interface.profile_rate
    if not 0.0 < rate <= 1.0:
        raise ValueError(
            f"config.interface.profile_rate={rate} is the new round's share of the profile; set it above 0.0 and at "
            "most 1.0"
        )
    if config.interface.placement == "inline" and exposure not in (0.0, 1.0):
        raise ValueError(
            f"config.interface.placement='inline' puts cues into the prompt that a whole group shares, so "
            f"config.interface.exposure={exposure} cannot be met; set exposure=1.0 or placement='note'"
        )
    if config.interface.strip_in_update and not 0.0 < exposure < 1.0:
        raise ValueError(
            f"config.interface.strip_in_update needs bare and cued rows in each group, but "
            f"config.interface.exposure={exposure}; set it to 0.5"
        )
    for name in ("prompt", "suffix", "chunk", "groups", "rows"):
        sizes = config.buckets[name]
        empty = not sizes and name != "rows"
        if empty or list(sizes) != sorted(set(sizes)) or any(size < 1 for size in sizes):
            raise ValueError(f"config.buckets.{name}={tuple(sizes)} must be positive and ascending, e.g. (128, 256)")
    longest = config.buckets.suffix[-1]
    if longest <= config.limits.max_new_tokens:
        raise ValueError(
            f"config.buckets.suffix[-1]={longest} must be larger than config.limits.max_new_tokens="
            f"{config.limits.max_new_tokens}: it holds the whole episode; add a larger suffix bucket"
        )
    if config.buckets.chunk[-1] > longest:
        raise ValueError(
            f"config.buckets.chunk[-1]={config.buckets.chunk[-1]} is larger than config.buckets.suffix[-1]={longest}, "
            "which it is written into; lower it"
        )
    if config.tasks_per_round % config.learner.minibatches:
        raise ValueError(
            f"config.tasks_per_round={config.tasks_per_round} is not divisible by "
            f"config.learner.minibatches={config.learner.minibatches}; choose a divisor"
        )
    unknown = sorted(set(config.interface.components) - {"schema", "err", "cap"})
    if unknown:
        raise ValueError(f"config.interface.components holds {unknown}; choose from ('schema', 'err', 'cap')")
    if config.warm_start.enabled and config.policy.source == "gguf":
        raise ValueError(
            "config.warm_start.enabled=True trains random weights or a folder's, but config.policy.source='gguf'; set "
            "config.warm_start.enabled=False"
        )
    if config.warm_start.enabled:
        for key in ("demos", "per_skin"):
            at_least(config, f"warm_start.{key}", 1)
    if config.warm_start.enabled and config.suite != "toolbox":
        raise ValueError(
            f"config.warm_start.enabled needs demonstrations, and config.suite={config.suite!r} has no teacher; "
            "set config.warm_start.enabled=False"
        )


def check_cued(config: ConfigDict) -> None:
    cued = tuple(config.eval.cued)
    if len(set(cued)) < len(cued) or not set(cued) <= set(FAILURE_LABELS):
        raise ValueError(f"config.eval.cued={cued} must name some of the failure labels {FAILURE_LABELS}, each once")
    if cued and config.eval.cued_tasks == 0:
        raise ValueError("config.eval.cued_tasks=0 leaves nothing to show cues in; set config.eval.cued=(), or to -1")


def check_protocols(config: ConfigDict) -> None:
    protocols = tuple(config.eval.protocols)
    if not protocols or len(set(protocols)) < len(protocols) or not set(protocols) <= set(PROTOCOLS):
        raise ValueError(f"config.eval.protocols={protocols} must name one or more of {PROTOCOLS}, each once")
    if "official" in protocols and config.suite != "bfcl":
        raise ValueError(
            f"config.eval.protocols={protocols} but only suite 'bfcl' has an official protocol, and config.suite="
            f"{config.suite!r}; set config.eval.protocols=('seal',)"
        )
    if "official" in protocols and config.chat not in DECODER_OF_CHAT:
        raise ValueError(
            f"config.eval.protocols={protocols} but the official package has no handler for config.chat="
            f"{config.chat!r}; set config.eval.protocols=('seal',), or config.chat to one of {sorted(DECODER_OF_CHAT)}"
        )


def check_types(config: ConfigDict, default: ConfigDict, at: str = "config") -> None:
    """The keys and types of `default`, and no number that is not finite: a lock alone lets None pass, and a mapping
    that is replaced whole."""
    for key in sorted(set(config) ^ set(default)):
        what = "is not known" if key in config else "is missing"
        raise ValueError(f"{at}.{key} {what}; there are {sorted(default)}")
    for key, like in default.items():
        value, name = config[key], f"{at}.{key}"
        if not isinstance(value, type(like)) or (isinstance(value, bool) and not isinstance(like, bool)):
            raise ValueError(f"{name}={value!r} must be of type {type(like).__name__}, e.g. {like!r}")
        if name.removeprefix("config.") in OPEN:
            check_finite(name, value.to_dict())
        elif isinstance(value, ConfigDict):
            check_types(value, like, name)
        else:
            check_finite(name, value)
            element = str if name.startswith(("config.interface.", "config.eval.")) else int
            if isinstance(value, tuple) and any(type(x) is not element for x in value):
                raise ValueError(f"{name}={value!r} must hold {element.__name__} only")


def check_finite(name: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            check_finite(f"{name}.{key}", inner)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}={value} is not a finite number; set it to one")


def at_least(config: ConfigDict, key: str, low: int) -> None:
    if lookup(config, key) < low:
        raise ValueError(f"config.{key}={lookup(config, key)}: must be at least {low}")


def one_of(config: ConfigDict, key: str, allowed: tuple[str, ...]) -> None:
    if lookup(config, key) not in allowed:
        raise ValueError(f"config.{key}={lookup(config, key)!r} is not known; choose one of {allowed}")


def lookup(config: ConfigDict, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value[part]
    return value
