"""A teacher that knows the script of a task and has bad habits: the source of demonstrations for a warm start.

The teacher plays an episode as an assistant does, one call a message: it looks ids up, tries the action, and meets
refusals as the policy will meet them. How often it then gives up, calls tools where it should abstain, or garbles
arguments is set by `Habits`; a policy cloned to convergence takes these rates over. A weak teacher is what leaves
reinforcement learning something to do: a habit with a right share of about .05 is found and unlearned, one of 0 is not.

The teacher never writes what the conversation so far does not tell: an id that was not looked up (because an earlier
turn was given up) is looked up first, or the teacher gives up. Otherwise demonstrations would teach inventing ids.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from seal_jax.envs.toolbox.domain import RoleCall, dress, role_of, undress
from seal_jax.envs.toolbox.generator import (
    LOOKUPS,
    Script,
    ScriptStep,
    make_scenario,
    make_task,
    open_instance,
    troubles_at,
)
from seal_jax.envs.toolbox.skins import ALL_KINDS, TRAIN_SKINS, random_skin, skins_of
from seal_jax.envs.toolbox.suite import TaskStore
from seal_jax.envs.toolbox.words import NAMES, NOTES
from seal_jax.types import CATEGORIES, Call, CallResult, Task

#: As in `suite`, for demonstrations: more trouble, because repairs are rare as it is with a teacher that gives up.
_UNTROUBLED, _AT_MOST_ONE = 0.37, 0.87

DONE = "done."
GAVE_UP = "it failed."
NO_TOOL = "no tool for that."
ASK = "please tell me more."


@dataclass(frozen=True)
class Habits:
    """Probabilities of doing the wrong thing, each time there is an occasion.

    `*_cued` holds where the refusal came with cue text, `*_noted` where the conversation holds Ω's note.
    """

    give_up: float = 0.95  # after a refusal: ends the turn instead of repairing
    give_up_cued: float = 0.15
    spurious: float = 0.6  # a needed tool is missing: calls a look-up or another tool
    spurious_noted: float = 0.2
    guess: float = 0.6  # a value is missing: looks up, or acts with a guessed value
    guess_noted: float = 0.2
    swap: float = 0.05  # two arguments of the same sort change places
    name_as_id: float = 0.03  # acts on the name instead of the id
    forget: float = 0.05  # leaves an optional argument out
    slip: float = 0.01  # a wrong number

    def __post_init__(self) -> None:
        for f in fields(self):
            if not 0.0 <= getattr(self, f.name) <= 1.0:
                raise ValueError(f"habits.{f.name}={getattr(self, f.name)!r}: a probability is between 0 and 1")


NO_HABITS = Habits(**{f.name: 0.0 for f in fields(Habits)})


@dataclass(frozen=True)
class View:
    """What the teacher sees before each message: the open turn, the results of its last message if that was in this
    turn, and whether cue text stands with them (`cued`) or in a note (`noted`)."""

    turn: int
    results: tuple[CallResult, ...] = ()
    cued: bool = False
    noted: bool = False


class Reply(NamedTuple):
    """Calls to make, or (no calls) the text that ends the turn."""

    calls: tuple[Call, ...]
    text: str = ""


class Teacher:
    """Plays one episode of one task: `reply` once per assistant message, in order. Make a new one to replay."""

    def __init__(self, task: Task, suite: TaskStore, rng: random.Random, habits: Habits = NO_HABITS) -> None:
        built = suite.built_task(task)
        self._task, self._rng, self._habits = task, rng, habits
        self._scenario = built.scenario
        self._script: tuple[Script, ...] = built.script
        self._shadow = open_instance(built)  # follows the episode's world, to see what a refusal asks for
        self._turn = -1
        self._plan: list[ScriptStep] = []
        self._wrong: list[Call] = []  # an excursion on an abstain turn
        self._excuse = ASK  # the text that ends an abstain turn
        self._trying: Call | None = None  # the right form of the action in progress
        self._last = ""  # what the last message was: "try", "garbled" (a try gone wrong by habit) or "repair"
        self._words: set[str] = set()  # everything said by user and tools so far
        self._sources: dict[str, Call] | None = None

    def reply(self, view: View) -> Reply:
        for result in view.results:
            self._hear(result)
        if view.turn != self._turn:
            self._open_turn(view)
            return self._stray(None) if not self._script[self._turn] else self._next()
        last = view.results[-1] if view.results else None
        if not self._script[self._turn]:
            return self._stray(last)
        if last is None:  # a message was rejected as malformed: not the teacher's way, but no reason to break
            return self._stop(GAVE_UP)
        return self._after(last, view.cued)

    # --- turns ---------------------------------------------------------------------------------------------------
    def _open_turn(self, view: View) -> None:
        self._turn = view.turn
        self._plan = list(self._script[view.turn])
        self._trying, self._wrong = None, []
        self._words.update(_tokens(self._task.turns[view.turn].user))
        if not self._plan:
            missing_tool = self._task.category == "miss_func"
            self._excuse = NO_TOOL if missing_tool else ASK
            h = self._habits
            bad = (h.spurious, h.spurious_noted) if missing_tool else (h.guess, h.guess_noted)
            if self._rng.random() < bad[view.noted]:
                self._wrong = self._excursion(missing_tool)
                self._excuse = DONE

    def _excursion(self, missing_tool: bool) -> list[Call]:
        """Calls that should not be made on this abstain turn; the deferred request is the next turn's script."""
        deferred = [step.call for step in self._script[self._turn + 1]]
        lookups = [c for c in deferred if self._role(c) in LOOKUPS and self._knows(c)]
        if missing_tool:
            return lookups[:1] or self._idle_read(deferred[-1])
        guessed = self._guessed(deferred)
        return guessed or lookups[:1] or self._idle_read(deferred[-1])

    def _guessed(self, deferred: list[Call]) -> list[Call]:
        """The deferred calls with the missing value made up; a made-up name only gets as far as its look-up."""
        key, rng, skin = self._scenario.gap.key, self._rng, self._scenario.skin
        values: Mapping[str, Any] = {
            "amount": rng.randint(5, 19),
            "value": rng.randint(10, 59),
            "minutes": rng.randint(10, 59),
            "plan": rng.choice(skin.choices.get("plan", ("",))),
            "text": rng.choice(NOTES),
            "who": rng.choice(NAMES["people"]),
        }
        if key in values:
            calls = []
            for call in deferred:
                canonical = self._undress(call)
                guessed = key in canonical.args and canonical.role not in LOOKUPS
                calls.append(self._dress(canonical, {key: values[key]}) if guessed else call)
                if guessed:
                    return calls if self._all_known(calls[:-1]) else []
            return []
        for call in deferred:
            canonical = self._undress(call)
            if canonical.role in LOOKUPS and not self._knows(call):
                return [self._dress(canonical, {next(iter(canonical.args)): rng.choice(skin.names)})]
        return []

    def _all_known(self, calls: list[Call]) -> bool:
        return all(self._knows(c) for c in calls)

    def _idle_read(self, action: Call) -> list[Call]:
        """Looking at what the request is about, instead of abstaining."""
        canonical = self._undress(action)
        if "id" not in canonical.args or not self._knows(action):
            return []
        offered = {doc["name"] for doc in self._task.tools}
        for role in self._scenario.domain.roles:
            call = self._dress(RoleCall(role.key, {"id": canonical.args["id"]}), {})
            if not role.mutates and [a.key for a in role.args] == ["id"] and call.name in offered:
                return [call]
        return []

    # --- steps ---------------------------------------------------------------------------------------------------
    def _stray(self, last: CallResult | None) -> Reply:
        """The next message of an abstain turn: the excursion, as far as it is not refused, then text."""
        if self._wrong and (last is None or last.ok):
            return Reply((self._wrong.pop(0),))
        return Reply((), self._excuse)

    def _after(self, result: CallResult, cued: bool) -> Reply:
        """The message that follows the result of the last one."""
        assert self._trying is not None
        if result.ok:
            if self._last == "repair":
                return self._send(self._trying, "try")
            self._plan.pop(0)
            return self._next()
        if self._rng.random() < (self._habits.give_up_cued if cued else self._habits.give_up):
            return self._stop(GAVE_UP)
        if self._last == "garbled":
            return self._send(self._trying, "try")
        repair = self._shadow.repair(self._undress(self._trying)) if self._last == "try" else None
        if repair is None or not self._knows(self._dress(repair, {})):
            return self._stop(GAVE_UP)
        return self._send(self._dress(repair, {}), "repair")

    def _next(self) -> Reply:
        """The first attempt at the next call of the plan."""
        if not self._plan:
            return self._stop(DONE)
        call = self._plan[0].call
        if unknown := self._unknown(call):
            lookup = self._source(unknown[0])
            if lookup is None or not self._knows(lookup):
                return self._stop(GAVE_UP)
            self._plan.insert(0, ScriptStep(lookup))
            call = lookup
        self._trying = call
        attempt = self._garble(call)
        return self._send(attempt, "try" if attempt == call else "garbled")

    def _send(self, call: Call, last: str) -> Reply:
        self._last = last
        return Reply((call,))

    def _stop(self, text: str) -> Reply:
        self._plan, self._trying = [], None
        return Reply((), text)

    def _garble(self, call: Call) -> Call:
        h, rng, canonical = self._habits, self._rng, self._undress(call)
        role = role_of(self._scenario.domain, canonical.role)
        args = dict(canonical.args)
        if role.key in LOOKUPS or role.key == "login":
            return call
        if "source" in args and rng.random() < h.swap:
            args["source"], args["target"] = args["target"], args["source"]
        if "id" in args and rng.random() < h.name_as_id:
            lookup = self._source(args["id"])
            if lookup is not None:
                args["id"] = next(iter(lookup.arguments.values()))
        for a in role.args:
            if a.key in args and not a.required and rng.random() < h.forget:
                del args[a.key]
            elif a.key in args and a.type == "integer" and rng.random() < h.slip:
                args[a.key] = rng.randint(5, 59)
        return call if args == canonical.args else self._dress(RoleCall(role.key, args), {})

    # --- what the conversation tells -----------------------------------------------------------------------------
    def _hear(self, result: CallResult) -> None:
        self._words.update(_tokens(result.text))
        canonical = undress(self._scenario.domain, self._scenario.skin, result.call)
        if canonical is not None and result.error in ("none", "tool_error"):
            getattr(self._shadow, canonical.role)(**canonical.args)

    def _unknown(self, call: Call) -> list[str]:
        canonical = self._undress(call)
        enums = {a.key for a in role_of(self._scenario.domain, canonical.role).args if a.choices}
        return [v for k, v in canonical.args.items() if isinstance(v, str) and k not in enums and v not in self._words]

    def _knows(self, call: Call) -> bool:
        return not self._unknown(call)

    def _source(self, value: str) -> Call | None:
        """The look-up whose result tells this id, if the script has one."""
        if self._sources is None:
            self._sources = {}
            for step in (step for turn in self._script for step in turn):
                canonical = self._undress(step.call)
                if canonical.role in LOOKUPS:
                    key = next(iter(canonical.args.values()))
                    places = getattr(self._shadow, "_places", None)
                    ids = places[key].values() if places is not None else [self._shadow._ids[key]]  # type: ignore[attr-defined]
                    self._sources.update(dict.fromkeys(ids, step.call))
        return self._sources.get(value)

    def _role(self, call: Call) -> str:
        return self._undress(call).role

    def _undress(self, call: Call) -> RoleCall:
        canonical = undress(self._scenario.domain, self._scenario.skin, call)
        assert canonical is not None
        return canonical

    def _dress(self, canonical: RoleCall, changed: Mapping[str, Any]) -> Call:
        call = replace(canonical, args={**canonical.args, **changed})
        return dress(self._scenario.domain, self._scenario.skin, call)


_TOKEN = re.compile(r"[a-z]\d|[a-z]+")


def _tokens(text: str) -> list[str]:
    return _TOKEN.findall(text)


# --- demonstrations --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Demo:
    """One demonstration to be played: `suite` opens its world, `teacher` gives the messages (once)."""

    task: Task
    suite: TaskStore
    teacher: Teacher


def demonstrations(
    seed: int,
    n: int,
    habits: Habits | None = None,
    *,
    fixed_share: float,
    per_skin: int = 1,
    avoid: Collection[str] = (),
    kinds: Sequence[str] = ALL_KINDS,
) -> Iterator[Demo]:
    """`n` demonstrations of all kinds and categories, from scenarios that no split holds.

    Args:
      seed: demonstrations are a function of (seed, index, habits, fixed_share, per_skin).
      fixed_share: share played in the training domains; the rest in random skins, which never use a held-out
        domain's tool name.
      per_skin: so many in a row have the same skin, category and order of tools, so that their prompts begin alike and
        can be computed together.
      avoid: user texts that must not come up (`ToolboxSuite.user_texts`).
      kinds: of domains (`ToolboxSuite.kinds`).
    """
    if not 0.0 <= fixed_share <= 1.0:
        raise ValueError(f"fixed_share={fixed_share!r}: a share is between 0 and 1")
    habits = Habits() if habits is None else habits
    fixed = skins_of(TRAIN_SKINS, kinds)
    for i in range(n):
        block = i // per_skin
        shared, rng = random.Random(f"toolbox/demo/{seed}/skin/{block}"), random.Random(f"toolbox/demo/{seed}/{i}")
        if shared.random() < fixed_share:
            skin = shared.choice(fixed)
        else:
            skin = random_skin(shared, kinds[(block // len(CATEGORIES)) % len(kinds)])
        order = shared.sample(sorted(skin.tool_names), len(skin.tool_names))
        taken = set(avoid) if avoid else None
        troubles = troubles_at(rng.random(), _UNTROUBLED, _AT_MOST_ONE)
        scenario = make_scenario(
            f"demo{seed}-{i:05d}", skin, f"toolbox/demo/{seed}/{i}", troubles=troubles, taken=taken
        )
        scenario = replace(scenario, tools=tuple(sorted(scenario.tools, key=lambda doc: order.index(doc["name"]))))
        built = make_task(scenario, CATEGORIES[block % len(CATEGORIES)])
        suite = TaskStore({"demo": (built,)})
        yield Demo(built.task, suite, Teacher(built.task, suite, rng, habits))
