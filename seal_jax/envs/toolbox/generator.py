"""Seeded scenarios, and the four tasks (one per category) that are written from each.

A scenario is a skin, an initial state, what the user will say turn by turn, and a script: the calls that meet it, found
by playing them on a live instance, together with the repair that each refusal on the way asks for. All randomness comes
from `random.Random(<seed string>)`; nothing depends on hashes, set order or the host.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seal_jax.envs.toolbox.booking import Booking
from seal_jax.envs.toolbox.desk import Desk
from seal_jax.envs.toolbox.devices import Devices
from seal_jax.envs.toolbox.domain import Domain, Gap, Intent, dress, instance_class, tool_doc
from seal_jax.envs.toolbox.ledger import Ledger
from seal_jax.envs.toolbox.skins import Skin
from seal_jax.types import CATEGORIES, Call, Program, Task, ToolDoc, UserTurn

KINDS: Mapping[str, type[Domain]] = {c.kind: c for c in (Ledger, Devices, Desk, Booking)}
LOOKUPS = frozenset({"find", "scan"})

#: (number of intents per turn, weight): 2-3 turns; miss_* tasks have one more.
_SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (((1, 1), 6), ((1, 2), 1), ((2, 1), 1), ((1, 1, 1), 2))
#: Messages with calls that a turn, and an episode, may need at most (with refused attempts and repairs).
_MAX_IN_TURN, _MAX_IN_EPISODE = 6, 10


@dataclass(frozen=True)
class ScriptStep:
    """A call that the turn needs, and the repairs without which it would be refused here, in order."""

    call: Call
    repairs: tuple[Call, ...] = ()


#: One turn of a script; empty on an abstain turn.
Script = tuple[ScriptStep, ...]


@dataclass(frozen=True)
class Scenario:
    id: str
    skin: Skin
    domain: type[Domain]  # the kind in this skin
    state: Mapping[str, Any]
    intents: tuple[tuple[Intent, ...], ...]  # by turn of the base task
    script: tuple[Script, ...]  # by turn of the base task
    tools: tuple[ToolDoc, ...]  # in the order the prompt shows them
    miss_turn: int  # the turn that miss_func and miss_param postpone
    miss_tool: str
    gap: Gap

    @property
    def refusals(self) -> int:
        return sum(len(step.repairs) for turn in self.script for step in turn)


@dataclass(frozen=True)
class BuiltTask:
    """A task with everything that only the suite may know."""

    task: Task
    scenario: Scenario
    script: tuple[Script, ...]

    @property
    def programs(self) -> tuple[Program, ...]:
        """The reference programs: each call after its repairs, no refused call."""
        return tuple(tuple(c for step in turn for c in (*step.repairs, step.call)) for turn in self.script)


class _DeadEnd(Exception):
    """This draw gives no scenario; the next attempt draws again."""


def troubles_at(u: float, untroubled: float, at_most_one: float) -> int:
    """How many troubles (0, 1, 2) a scenario at quantile 0 <= u < 1 gets, given the shares without and with at most
    one."""
    return int(u >= untroubled) + int(u >= at_most_one)


def make_scenario(id: str, skin: Skin, seed: str, *, troubles: int, taken: set[str] | None = None) -> Scenario:
    """The scenario of a seed string.

    Args:
      troubles: how many things are made to stand in the way; the scenario has refusals iff it is not 0.
      taken: user texts of earlier scenarios, which are not repeated; grows.

    Raises:
      RuntimeError: 1,000 attempts gave nothing (a bug in a kind's generator).
    """
    for attempt in range(1000):
        try:
            scenario = _attempt(id, skin, random.Random(f"{seed}/{attempt}"), troubles)
        except _DeadEnd:
            continue
        said = user_text(scenario)
        if taken is None:
            return scenario
        if said not in taken:
            taken.add(said)
            return scenario
    raise RuntimeError(f"toolbox generator: no scenario for seed {seed!r} in skin {skin.name!r}")


def user_text(scenario: Scenario) -> str:
    """All that the user wishes in a scenario: what no two splits share."""
    return "\n".join(i.text for turn in scenario.intents for i in turn)


def _attempt(id: str, skin: Skin, rng: random.Random, troubles: int) -> Scenario:
    domain = instance_class(KINDS[skin.kind], skin)
    state = domain.initial(skin, rng)
    intents = _draw_intents(domain, skin, state, rng)
    said = [i for turn in intents for i in turn]
    domain.settle(state, said)
    possible = domain.troubles(state, said)
    for trouble in rng.sample(possible, min(troubles, len(possible))):
        trouble(state)
    script = _play(domain, skin, state, intents)
    if any(step.repairs for turn in script for step in turn) != (troubles > 0):
        raise _DeadEnd
    docs = [tool_doc(domain, skin, role) for role in domain.roles]
    rng.shuffle(docs)
    turn, tool = _choose_miss(domain, skin, intents, script, rng)
    return Scenario(
        id, skin, domain, state, intents, script, tuple(docs), turn, tool, rng.choice(intents[turn][0].gaps)
    )


def _draw_intents(
    domain: type[Domain], skin: Skin, state: Mapping[str, Any], rng: random.Random
) -> tuple[tuple[Intent, ...], ...]:
    shape = rng.choices([s for s, _ in _SHAPES], [w for _, w in _SHAPES])[0]
    said: list[Intent] = []
    turns = []
    for size in shape:
        turn: list[Intent] = []
        for _ in range(20):
            if len(turn) == size:
                break
            drawn = domain.draw(skin, state, rng, said)
            if drawn is not None:
                turn.append(drawn)
                said.append(drawn)
        else:
            raise _DeadEnd
        turns.append(tuple(turn))
    return tuple(turns)


def _play(
    domain: type[Domain], skin: Skin, state: Mapping[str, Any], intents: Sequence[Sequence[Intent]]
) -> tuple[Script, ...]:
    """Plays the intents on a live instance: what is refused is repaired and tried again; known ids stand."""
    live = domain(skin, state)
    known: list[Any] = []
    script = []
    for turn in intents:
        steps: list[ScriptStep] = []
        for call in (c for intent in turn for c in intent.calls):
            if call.role in LOOKUPS:
                if call in known:
                    continue
                known.append(call)
            repairs: list[Call] = []
            while "error" in getattr(live, call.role)(**call.args):
                repair = live.repair(call)
                if repair is None or len(repairs) == 3 or "error" in getattr(live, repair.role)(**repair.args):
                    raise _DeadEnd
                repairs.append(dress(domain, skin, repair))
            steps.append(ScriptStep(dress(domain, skin, call), tuple(repairs)))
        if not steps or _messages(steps) > _MAX_IN_TURN:
            raise _DeadEnd
        script.append(tuple(steps))
    if sum(map(_messages, script)) > _MAX_IN_EPISODE:
        raise _DeadEnd
    return tuple(script)


def _messages(steps: Sequence[ScriptStep]) -> int:
    """Calls of a turn when each refusal is met, repaired and tried again."""
    return sum(1 + 2 * len(step.repairs) for step in steps)


def _choose_miss(
    domain: type[Domain],
    skin: Skin,
    intents: Sequence[Sequence[Intent]],
    script: Sequence[Script],
    rng: random.Random,
) -> tuple[int, str]:
    """A turn that can be postponed, and its tool to hold out: one wish with a value to leave out, whose acting tool no
    earlier turn needs (neither to act nor to repair)."""
    options = []
    earlier: set[str] = set()
    for t, turn in enumerate(intents):
        if len(turn) == 1 and turn[0].holdable and turn[0].gaps:
            acting = next(c for c in turn[0].calls if c.role not in LOOKUPS)
            if skin.tools[acting.role] not in earlier:
                options.append((t, skin.tools[acting.role]))
        earlier.update(c.name for step in script[t] for c in (step.call, *step.repairs))
    if not options:
        raise _DeadEnd
    return rng.choice(options)


def make_task(scenario: Scenario, category: str, suite: str = "toolbox") -> BuiltTask:
    """The scenario's task of one category."""
    users = [UserTurn(" ".join(i.text for i in turn)) for turn in scenario.intents]
    script = list(scenario.script)
    tools = scenario.tools
    m = scenario.miss_turn
    if category == "miss_func":
        held = tuple(doc for doc in tools if doc["name"] == scenario.miss_tool)
        tools = tuple(doc for doc in tools if doc["name"] != scenario.miss_tool)
        users.insert(m + 1, UserTurn("", held))
        script.insert(m, ())
    elif category == "miss_param":
        users[m : m + 1] = [UserTurn(scenario.gap.vague), UserTurn(scenario.gap.supply)]
        script.insert(m, ())
    elif category not in ("base", "long_context"):
        raise ValueError(f"category {category!r} is not known; choose one of {list(CATEGORIES)}")
    task = Task(
        id=f"{suite}/{scenario.id}/{category}",
        suite=suite,
        category=category,
        scenario=scenario.id,
        turns=tuple(users),
        tools=tools,
        domains=(scenario.skin.name,),
    )
    return BuiltTask(task, scenario, tuple(script))


def open_instance(built: BuiltTask) -> Domain:
    """A fresh instance in the task's initial state; distractors only in a long-context world."""
    state = built.scenario.state
    if built.task.category != "long_context":
        state = {k: v for k, v in state.items() if k != "_padding"}
    return built.scenario.domain(built.scenario.skin, state)
