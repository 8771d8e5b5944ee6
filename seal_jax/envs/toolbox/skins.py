"""A skin dresses a kind of domain in words: tool names, argument names, nouns, status words and enum values.

The kind is the state machine; the skin is what the policy reads. The training domains and the held-out domains are
fixed skins; a share of the demonstrations (1 - config.warm_start.fixed_share) is given in random ones, so that a cloned
policy has to read the tool docs instead of knowing the tools by heart.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from seal_jax.envs.toolbox.words import ARGUMENTS, CHOICES, DEVICES, NAMES, NOUNS, STATUS, VERBS

#: For each kind: role -> which noun ends the tool's name.
TOOL_NOUNS: Mapping[str, Mapping[str, str]] = {
    "ledger": {"find": "entity", "count": "unit", "add": "unit", "move": "unit", "thaw": "entity", "grade": "entity"},
    "devices": {
        "scan": "place",
        "level": "entity",
        "power": "entity",
        "release": "entity",
        "timer": "entity",
        "sense": "entity",
    },
    "desk": {
        "login": "user",
        "find": "entity",
        "note": "entity",
        "assign": "entity",
        "reopen": "entity",
        "close": "entity",
        "show": "entity",
    },
    "booking": {
        "find": "entity",
        "count": "entity",
        "reserve": "entity",
        "confirm": "ticket",
        "cancel": "ticket",
        "renew": "ticket",
        "refresh": "entity",
    },
}

#: For each kind: the argument meanings, enums, status words and sorts of names that a skin has to choose.
_ARGUMENTS = {
    "ledger": ("id", "who", "amount", "source", "target", "speed", "plan"),
    "devices": ("id", "where", "value", "state", "minutes", "repeat"),
    "desk": ("id", "topic", "who", "text", "urgency"),
    "booking": ("id", "what", "amount", "hold", "speed"),
}
_CHOICES = {"ledger": ("speed", "plan"), "devices": ("state",), "desk": ("urgency",), "booking": ("speed",)}
_STATUS = {"ledger": ("frozen",), "devices": ("locked",), "desk": ("closed", "absent"), "booking": ("expired", "stale")}
_NAMES = {"ledger": ("people", "goods"), "devices": ("places",), "desk": ("topics",), "booking": ("goods",)}


@dataclass(frozen=True, eq=False)
class Skin:
    """One domain in words. Mappings are never changed after construction."""

    name: str  # the domain, and the name of its tool instance
    kind: str
    tools: Mapping[str, str]  # role -> tool name
    arguments: Mapping[str, str]  # meaning -> argument name
    nouns: Mapping[str, str]
    status: Mapping[str, str]  # canonical status -> the word that errors show
    choices: Mapping[str, tuple[str, ...]]  # enum meaning -> its values; the first is the default
    names: tuple[str, ...]  # what users call the entities
    devices: tuple[str, ...] = field(default=())  # kind "devices" only: what stands in each place

    @property
    def tool_names(self) -> frozenset[str]:
        return frozenset(self.tools.values())


def make_skin(
    name: str,
    kind: str,
    *,
    verbs: str,
    nouns: Mapping[str, str],
    arguments: str,
    status: str,
    choices: Mapping[str, tuple[str, ...]],
    names: tuple[str, ...],
    devices: tuple[str, ...] = (),
) -> Skin:
    """A fixed skin from space-separated words, one per role, argument meaning and status in the kind's order."""
    roles = tuple(VERBS[kind])
    return Skin(
        name,
        kind,
        tools={r: f"{v}_{nouns[TOOL_NOUNS[kind][r]]}" for r, v in zip(roles, verbs.split(), strict=True)},
        arguments=dict(zip(_ARGUMENTS[kind], arguments.split(), strict=True)),
        nouns=dict(nouns),
        status=dict(zip(_STATUS[kind], status.split(), strict=True)),
        choices=dict(choices),
        names=names,
        devices=devices,
    )


#: The training domains: six skins of four kinds.
TRAIN_SKINS: tuple[Skin, ...] = (
    make_skin(
        "bank",
        "ledger",
        verbs="find check add send thaw rank",
        nouns={"entity": "account", "unit": "coins"},
        arguments="id owner amount source target speed plan",
        status="frozen",
        choices={"speed": ("slow", "fast"), "plan": ("basic", "silver", "gold")},
        names=NAMES["people"],
    ),
    make_skin(
        "home",
        "devices",
        verbs="list set switch release run measure",
        nouns={"place": "room", "entity": "device"},
        arguments="id where level state minutes daily",
        status="locked",
        choices={"state": ("off", "on")},
        names=NAMES["places"],
        devices=("lamp", "fan", "heater", "oven", "radio"),
    ),
    make_skin(
        "support",
        "desk",
        verbs="login find comment assign reopen close show",
        nouns={"entity": "ticket", "user": "agent"},
        arguments="id title person text priority",
        status="closed out",
        choices={"urgency": ("low", "high")},
        names=NAMES["topics"],
    ),
    make_skin(
        "shop",
        "booking",
        verbs="lookup count reserve buy cancel renew sync",
        nouns={"entity": "item", "ticket": "basket"},
        arguments="code product quantity number service",
        status="expired stale",
        choices={"speed": ("cheap", "express")},
        names=NAMES["goods"],
    ),
    make_skin(
        "depot",
        "ledger",
        verbs="locate tally load shift unseal sort",
        nouns={"entity": "bin", "unit": "boxes"},
        arguments="code client total origin goal mode grade",
        status="sealed",
        choices={"speed": ("later", "now"), "plan": ("small", "normal", "big")},
        names=NAMES["goods"],
    ),
    make_skin(
        "farm",
        "devices",
        verbs="survey adjust power unlatch schedule probe",
        nouns={"place": "field", "entity": "machine"},
        arguments="ref zone percent position duration repeat",
        status="latched",
        choices={"state": ("down", "up")},
        names=NAMES["places"],
        devices=("pump", "gate", "vent", "mixer", "camera"),
    ),
)

#: The held-out domains: no tool of theirs is ever offered in training tasks or demonstrations, all their words are.
OOD_SKINS: tuple[Skin, ...] = (
    make_skin(
        "port",
        "ledger",
        verbs="trace view grant carry clear rate",
        nouns={"entity": "berth", "unit": "crates"},
        arguments="key holder size giver taker pace tier",
        status="blocked",
        choices={"speed": ("sea", "air"), "plan": ("raw", "good", "best")},
        names=NAMES["people"],
    ),
    make_skin(
        "clinic",
        "desk",
        verbs="enter seek write route revive settle inspect",
        nouns={"entity": "case", "user": "nurse"},
        arguments="tag subject client body flag",
        status="ended away",
        choices={"urgency": ("minor", "major")},
        names=NAMES["topics"],
    ),
)

#: The kinds of domain, and which skins are of them.
ALL_KINDS = tuple(TOOL_NOUNS)


def skins_of(skins: tuple[Skin, ...], kinds: Sequence[str]) -> tuple[Skin, ...]:
    return tuple(skin for skin in skins if skin.kind in kinds)


_HELD_OUT = frozenset().union(*(s.tool_names for s in OOD_SKINS))


def random_skin(rng: random.Random, kind: str) -> Skin:
    """A skin drawn from the pools; none of its tools has the name of a held-out domain's tool."""
    while True:
        nouns = {key: rng.choice(pool) for key, pool in NOUNS[kind].items()}
        tools = {r: f"{rng.choice(pool)}_{nouns[TOOL_NOUNS[kind][r]]}" for r, pool in VERBS[kind].items()}
        arguments = {key: rng.choice(ARGUMENTS[key]) for key in _ARGUMENTS[kind]}
        if _HELD_OUT.isdisjoint(tools.values()) and len(set(arguments.values())) == len(arguments):
            break
    return Skin(
        name=f"{kind}_{nouns['entity']}",
        kind=kind,
        tools=tools,
        arguments=arguments,
        nouns=nouns,
        status={key: rng.choice(STATUS[key]) for key in _STATUS[kind]},
        choices={key: rng.choice(CHOICES[key]) for key in _CHOICES[kind]},
        names=NAMES[rng.choice(_NAMES[kind])],
        devices=tuple(rng.sample(DEVICES, 5)) if kind == "devices" else (),
    )
