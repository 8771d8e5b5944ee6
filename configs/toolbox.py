"""The toolbox with the parts of the method as an argument: one line changes one thing.

    python -m seal_jax.main --config=configs/toolbox.py:full --workdir=runs/full
    python -m seal_jax.main --config=configs/toolbox.py:vanilla --workdir=runs/vanilla

`experiments/ablation.py` runs them all, on starting policies of its own, and compares them. The world is half of the
quickstart's (two of the four kinds of domain) with more refusals on the way: a policy that never repairs one can solve
two tasks in five.
"""

from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs import quickstart
from seal_jax.interface.settings import COMPONENTS


class Arm(NamedTuple):
    """What it changes, beside vanilla; `part` is where it stands in the study's tables."""

    part: str
    says: str
    settings: dict[str, Any]


_BARE = {"interface.exposure": 0.0}
_STATIC = {**_BARE, "loss.reweight": "paper"}
_FULL = {"interface.exposure": 1.0, "loss.reweight": "paper"}
_HALF = {"interface.exposure": 0.5, "loss.reweight": "paper"}
_STRIP = {**_HALF, "interface.strip_in_update": True}
_FROZEN = {"interface.closed_loop": False}

#: Shape of the larger policy: about 1.9M parameters beside 0.75M.
LARGE = {"d_model": 192, "n_layers": 4, "n_heads": 6, "n_kv_heads": 6, "d_ff": 528}

#: Every arm of the study, named before any was run; only the "added" ones, which are never chosen, came after seed 0.
ARMS = {
    "vanilla": Arm("paper", "no environment side, no reweighting", _BARE),
    "no_environment": Arm("paper", "reweighting alone: static utilities", _STATIC),
    "no_reweighting": Arm("paper", "cues on every row, no reweighting", {"interface.exposure": 1.0}),
    "no_closed_loop": Arm(
        "paper", "as full, but the interface is frozen after the first profile", {**_FULL, **_FROZEN}
    ),
    "full": Arm("paper", "the paper's method: cues on every row", _FULL),
    "release": Arm(
        "paper",
        'what the released code does: a static "[required]" in the docs, dynamic tag weights, no early end',
        {
            "interface.exposure": 1.0,
            "interface.placement": "inline",
            "interface.components": ("schema",),
            "interface.schema_parts": ("required",),
            "interface.pinned": ("argument_mismatch",),
            "interface.closed_loop": False,
            "loss.reweight": "release",
            "stop_failed_turns": False,  # it tags the turns after a failed one too
            "buckets.prompt": (192, 256),  # the marks are long
        },
    ),
    "half": Arm("exposure", "cues on half of each group; the profile is counted on the other half", _HALF),
    "half_strip": Arm(
        "exposure", "half; cued successes are trained on without their cues, cued failures not at all", _STRIP
    ),
    "half_strip_plain": Arm(
        "exposure",
        "half_strip without reweighting",
        {"interface.exposure": 0.5, "interface.strip_in_update": True},
    ),
    "half_strip_frozen": Arm("exposure", "half_strip, frozen after the first profile", {**_STRIP, **_FROZEN}),
    "anneal": Arm(
        "exposure",
        "as full, but fewer rows see cues each round, none at the end; the profile is counted on the others",
        _FULL,
    ),
    "normalized": Arm(
        "weights",
        "static utilities, rescaled to leave the sum of |advantages| as it is",
        {**_STATIC, "loss.normalize_weights": True},
    ),
    "sign_aware": Arm(
        "weights",
        "a failure label scales negative advantages only, a success label positive ones only",
        {**_STATIC, "loss.sign_aware": True},
    ),
    "turn": Arm("weights", "static utilities on each turn's own tokens", {**_BARE, "loss.reweight": "turn"}),
    "random": Arm(
        "weights",
        "the same weights dealt out at random among the rows that teach",
        {**_STATIC, "loss.shuffle_labels": True},
    ),
    "progress": Arm(
        "reward",
        "vanilla, rewarded with the share of turns passed before the first failure",
        {**_BARE, "reward": "progress"},
    ),
    **{
        f"{phi}_only": Arm("components", f"half, with φ_{phi} alone", {**_HALF, "interface.components": (phi,)})
        for phi in COMPONENTS
    },
    "half_strip_anneal": Arm("added", "half_strip, but fewer rows see cues each round, none at the end", _STRIP),
    **{
        f"half_strip_{phi}": Arm("added", f"half_strip, with φ_{phi} alone", {**_STRIP, "interface.components": (phi,)})
        for phi in COMPONENTS
    },
}

# A clone of a teacher that gives up after every refusal unless a cue stands beside it.
_NEVER: dict[str, Any] = {
    "policy.source": "tiny",
    "policy.path": "",
    "warm_start.enabled": True,
    "warm_start.demos": 12800,
    "warm_start.epochs": 2,
    "warm_start.habits.give_up": 1.0,
    "rounds": 0,
    "eval.before": True,
}

# The same policy (--config.policy.path), trained a little further with a teacher that repairs a tenth of its refusals.
_SOMETIMES: dict[str, Any] = {
    "warm_start.enabled": True,
    "warm_start.demos": 1600,
    "warm_start.epochs": 1,
    "warm_start.learning_rate": 5e-4,
    "warm_start.habits.give_up": 0.9,
    "rounds": 0,
    "eval.before": True,
}

#: Runs that are not arms: they make and measure a starting policy.
STARTS: dict[str, dict[str, Any]] = {
    "never": _NEVER,
    "never_large": _NEVER,
    "sometimes": _SOMETIMES,
    "seldom": _SOMETIMES | {"warm_start.habits.give_up": 0.98},
    # One round whose rows, half of them cued, tell how often a refusal is repaired.
    "probe": {
        "tasks_per_round": 64,
        "rounds": 1,
        "interface.exposure": 0.5,
        "interface.pinned": ("recovery_failure",),
        "eval.test": 0,
        "eval.ood": 0,
        "eval.every": 0,
    },
}


def get_config(setting: str = "full") -> ConfigDict:
    if setting not in ARMS and setting not in STARTS:
        raise ValueError(f"configs/toolbox.py:{setting} is not known; choose one of {sorted([*ARMS, *STARTS])}")
    c = quickstart.base()
    c.suite_options.kinds, c.suite_options.troubled = ("ledger", "desk"), 0.6
    # As many scenarios as tasks are evaluated: the four tasks of one are solved or failed together.
    c.suite_options.val, c.suite_options.test, c.suite_options.ood = 100, 400, 100
    # Room for cues: the reference's rows have up to 345 tokens, with three cues 503 (only where one of them is that of
    # invalid_tool_call, which no run of the study asked for, up to 545). None may fail for its length.
    c.buckets.suffix = (192, 256, 320, 384, 512)
    c.rounds = 12
    c.interface.exposure, c.loss.reweight = 0.5, "none"
    c.optimizer.learning_rate = 3e-4
    c.eval.before = False
    c.eval.every, c.eval.val = 4, 100
    c.eval.test, c.eval.ood, c.eval.cued = 400, 100, ("recovery_failure", "spurious_tool_call", "missing_tool_call")
    c.eval.cued_tasks = 100
    c.checkpoint.every = 4
    if setting in ("anneal", "half_strip_anneal"):
        c.interface.anneal_rounds = 3 * c.rounds // 4
    if setting == "never_large":
        c.policy.overrides.update(LARGE)
    c.update_from_flattened_dict(ARMS[setting].settings if setting in ARMS else STARTS[setting])
    return c
