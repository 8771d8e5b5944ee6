"""Trajectories for the parity tests: perturbed reference programs, and a random family of slips.

No pytest and no package code in here, so that a fresh process can replay the same family:
`python tests/envs/bfcl_families.py SEED START STOP QUIRKS` prints one line of judgement per trajectory.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from seal_jax.diagnosis import diagnose, release_labels
from seal_jax.envs.base import make_suite
from seal_jax.envs.bfcl.suite import BfclSuite
from seal_jax.envs.verifier import Verifier
from seal_jax.types import Call, Program, Task, Unevaluated, Verdict

Turns = list[list[tuple[Call, ...]]]  # turns of steps of calls


def as_turns(programs: Sequence[Program]) -> Turns:
    return [[program] if program else [] for program in programs]


# --- perturbations of the reference programs --------------------------------------------------------------------------
def last_call_dropped(programs, task):
    turns = as_turns(programs)
    last = max(i for i, program in enumerate(programs) if program)
    turns[last] = [programs[last][:-1]] if len(programs[last]) > 1 else []
    return turns


def stops_half_way(programs, task):
    turns = as_turns(programs)
    half = len(turns) // 2
    return turns[:half] + [[] for _ in turns[half:]]


def every_call_doubled(programs, task):
    return [[tuple(call for call in program for _ in range(2))] if program else [] for program in programs]


def first_abstain_turn(programs):
    """The first turn without a program that is followed by one with a program; None if the task has none."""
    return next((i for i, (now, then) in enumerate(itertools.pairwise(programs)) if not now and then), None)


def acts_early_and_repeats(programs, task):
    turns, at = as_turns(programs), first_abstain_turn(programs)
    if at is None:
        return None
    turns[at] = [programs[at + 1]]
    return turns


def acts_early(programs, task):
    turns, at = as_turns(programs), first_abstain_turn(programs)
    if at is None:
        return None
    turns[at], turns[at + 1] = turns[at + 1], []
    return turns


def first_turn_skipped(programs, task):
    turns = as_turns(programs)
    turns[next(i for i, program in enumerate(programs) if program)] = []
    return turns


def trailing_cd_to_root(programs, task):
    if "GorillaFileSystem" not in task.domains:
        return None
    turns = as_turns(programs)
    turns[-1] = [*turns[-1], (Call("cd", {"folder": "/"}),)]
    return turns


#: Perturbation, how many of its tasks are valid officially, how many tasks it applies to.
PERTURBATIONS: list[tuple[Callable[..., Turns | None], int, int]] = [
    (last_call_dropped, 0, 800),
    (stops_half_way, 0, 800),
    (every_call_doubled, 288, 800),
    (acts_early_and_repeats, 273, 402),
    (acts_early, 0, 402),
    (first_turn_skipped, 0, 800),
    (trailing_cd_to_root, 200, 200),
]


# --- the random family ------------------------------------------------------------------------------------------------
ODD_TEXTS = (
    "",
    " ",
    "it's \"quoted\" '''thrice'''",
    "a\nb\r\n\tc\\n",
    "中文 – naïve ☃ \u202e \u2028",
    "\ud800 lone surrogate",
    "\x00\x07",
    "{'a': 1}",
    "None",
    "0",
    "../..",
    "/",
    ".",
    "*",
    "x" * 5000,
)
#: Text that the official executor rewrites.
CALL_LIKE = ("please sort (x) then cd(y)", "total (approx)", "f (x)", "echo (a)", "post_tweet (now)", "book_flight()")
ODD_VALUES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    1.0,
    -0.0,
    2.5,
    1e300,
    [],
    {},
    [1, [2, [3, {"k": None}]]],
    {"a": {"b": {"c": [True]}}},
    ["x", "y"],
    [None],
)
HUGE = (2**63, -(2**64), 10**30, 10**300, 7**5000)  # the last is beyond what Python prints in decimal
#: MathAPI's sums that would never end (ours refuses them; the official executor would hang) get no large numbers.
HEAVY = frozenset({"power", "round_number", "square_root", "logarithm", "percentage"})
#: Names that exist nowhere: not in Python either, whose own names the official executor would run.
UNKNOWN_TOOLS = ("no_such_tool", "Cd", "cd_", "do it", "", "GorillaFileSystem.cd", "remove", "run", "é", "1st", "cd;ls")
ODD_PARAMETERS = ("extra", "self", "from", "a b", "", "1", "None", "é")
LOOKS = {
    "GorillaFileSystem": ("pwd()", "ls()", "du()"),
    "MathAPI": ("add()",),
    "MessageAPI": ("list_users()", "view_messages_sent()"),
    "TwitterAPI": ("posting_get_login_status()", "list_all_following()"),
    "TicketAPI": ("ticket_get_login_status()",),
    "TradingBot": ("get_watchlist()", "get_account_info()", "get_current_time()"),
    "TravelAPI": ("list_all_airports()", "travel_get_login_status()", "get_all_credit_cards()"),
    "VehicleControlAPI": ("displayCarStatus()", "check_tire_pressure()", "get_current_speed()"),
}


@dataclass(frozen=True)
class Played:
    """One trajectory of the family. `quirky`: a slip was made that only the official quirks judge as officially."""

    index: int
    task: Task
    turns: Turns
    slips: tuple[str, ...]

    @property
    def quirky(self) -> bool:
        return any(slip in QUIRKY_SLIPS for slip in self.slips)


QUIRKY_SLIPS = frozenset({"call_like", "blank_name", "normalised_name", "endless_number", "deep", "shared"})


class Family:
    """Random slips in reference programs. Trajectory i depends on the seed and i alone."""

    def __init__(self, suite: BfclSuite, seed: int) -> None:
        self.suite, self.seed = suite, seed
        self.tasks = suite.tasks("all")
        self._docs = {
            task.id: {d["name"]: d for d in (*task.tools, *(d for turn in task.turns for d in turn.reveals))}
            for task in self.tasks
        }
        self._values = {task.id: tuple(_scalars(dict(suite._entry(task).scenarios))) for task in self.tasks}

    def __getitem__(self, index: int) -> Played:
        task = self.tasks[index * 7919 % len(self.tasks)]
        rng = random.Random(f"{self.seed} {index}")
        turns = [_cut(list(program), rng) for program in self.suite.reference(task)]
        slips = []
        for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 5))):
            slip = rng.choices(list(SLIPS), weights=[weight for _, weight in SLIPS.values()])[0]
            if turns and SLIPS[slip][0](self, task, turns, rng) is not False:
                slips.append(slip)
        return Played(index, task, [[tuple(step) for step in turn] for turn in turns], tuple(slips))

    def range(self, start: int, stop: int) -> Iterator[Played]:
        return (self[i] for i in range(start, stop))

    # Each slip changes the turns in place; False if there was nothing to change.
    def drop(self, task, turns, rng):
        where = _anywhere(turns, rng)
        if where is None:
            return False
        step, i = where
        del step[i]

    def double(self, task, turns, rng):
        where = _anywhere(turns, rng)
        if where is None:
            return False
        step, i = where
        step.insert(rng.randrange(len(step) + 1), step[i])

    def double_turn(self, task, turns, rng):
        turn = rng.choice(turns)
        turn += [list(step) for step in turn]

    def reorder(self, task, turns, rng):
        turn = rng.choice(turns)
        calls = [call for step in turn for call in step]
        if len(calls) < 2:
            return False
        rng.shuffle(calls)
        turn[:] = _cut(calls, rng)

    def move(self, task, turns, rng):
        """To another turn: also early, before a held-out tool is revealed, and onto abstain turns."""
        where = _anywhere(turns, rng)
        if where is None:
            return False
        step, i = where
        rng.choice(turns).insert(0, [step.pop(i)])

    def swap_turns(self, task, turns, rng):
        a, b = rng.randrange(len(turns)), rng.randrange(len(turns))
        turns[a], turns[b] = turns[b], turns[a]

    def act_early(self, task, turns, rng):
        """The next turn's calls now, and sometimes again when they are due."""
        at = rng.randrange(len(turns))
        if at + 1 >= len(turns) or not turns[at + 1]:
            return False
        turns[at] += [list(step) for step in turns[at + 1]]
        if rng.random() < 0.5:
            turns[at + 1] = []

    def empty_turn(self, task, turns, rng):
        rng.choice(turns).clear()

    def swap_arguments(self, task, turns, rng):
        places = [(step, i) for turn in turns for step in turn for i in range(len(step)) if step[i].arguments]
        if len(places) < 2:
            return False
        (a, i), (b, j) = rng.sample(places, 2)
        x, y = a[i], b[j]
        p, q = rng.choice(list(x.arguments)), rng.choice(list(y.arguments))
        a[i] = Call(x.name, {**x.arguments, p: y.arguments[q]}, x.positional)
        b[j] = Call(y.name, {**y.arguments, q: x.arguments[p]}, y.positional)

    def swap_two_of_one_call(self, task, turns, rng):
        def change(call, rng):
            if len(call.arguments) < 2:
                return None
            p, q = rng.sample(list(call.arguments), 2)
            return Call(call.name, {**call.arguments, p: call.arguments[q], q: call.arguments[p]}, call.positional)

        return _change(turns, rng, change)

    def retype(self, task, turns, rng):
        return _change_value(turns, rng, _retyped)

    def odd_value(self, task, turns, rng):
        return _change_value(turns, rng, lambda value, rng: rng.choice(ODD_VALUES))

    def odd_text(self, task, turns, rng):
        def change(value, rng):
            text = rng.choice(ODD_TEXTS)
            return value + text if isinstance(value, str) and rng.random() < 0.5 else text

        return _change_value(turns, rng, change)

    def nested(self, task, turns, rng):
        return _change_value(turns, rng, lambda value, rng: rng.choice(([value], {"value": value}, [[value], value])))

    def wrong_id(self, task, turns, rng):
        def change(value, rng):
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                return rng.choice(self._values[task.id] or (0,))
            if isinstance(value, str):
                return rng.choice((value[:-1], value + "x", value.upper(), value.title(), value[::-1], value + " "))
            return value + rng.choice((-1, 1, 10, 0.5))

        return _change_value(turns, rng, change)

    def value_of_the_world(self, task, turns, rng):
        values = self._values[task.id]
        return _change_value(turns, rng, lambda value, rng: rng.choice(values)) if values else False

    def huge(self, task, turns, rng):
        return _change_value(turns, rng, lambda value, rng: rng.choice(HUGE[:-1]), heavy=False)

    def unknown_tool(self, task, turns, rng):
        name = rng.choice(UNKNOWN_TOOLS)
        if rng.random() < 0.5:
            return _insert(turns, rng, Call(name, {"x": 1} if rng.random() < 0.5 else {}))
        return _change(turns, rng, lambda call, rng: Call(name, call.arguments, call.positional))

    def other_tool(self, task, turns, rng):
        """Another tool of this world with the same arguments."""
        names = sorted(set(self._docs[task.id]) - HEAVY)
        return _change(turns, rng, lambda call, rng: Call(rng.choice(names), call.arguments, call.positional))

    def other_tasks_calls(self, task, turns, rng):
        calls = [c for program in self.suite.reference(rng.choice(self.tasks)) for c in program]
        return _insert(turns, rng, *rng.sample(calls, min(len(calls), rng.randint(1, 4))))

    def look(self, task, turns, rng):
        return _insert(turns, rng, Call(rng.choice(LOOKS[rng.choice(task.domains)])[:-2]))

    def any_tool(self, task, turns, rng):
        """A tool of this world, its arguments drawn from what the world and the reference hold, mostly of the type."""
        return _insert(turns, rng, *(self._any_call(task, rng) for _ in range(rng.randint(1, 3))))

    def _any_call(self, task, rng):
        doc = self._docs[task.id][rng.choice(sorted(set(self._docs[task.id]) - HEAVY))]
        arguments = {}
        for name, schema in doc["parameters"]["properties"].items():
            if name in doc["parameters"]["required"] or rng.random() < 0.4:
                arguments[name] = self._value(task, schema, rng)
        return Call(doc["name"], arguments)

    def _value(self, task, schema, rng):
        kind = schema["type"]
        if rng.random() < 0.08:
            return rng.choice(ODD_VALUES)
        if kind == "array":
            return [self._value(task, schema.get("items", {"type": "string"}), rng) for _ in range(rng.randint(0, 3))]
        if kind == "dict":
            return {k: self._value(task, s, rng) for k, s in schema.get("properties", {}).items()}
        if kind == "boolean":
            return rng.random() < 0.5
        wanted = str if kind == "string" else int | float
        pool = [v for v in self._values[task.id] if isinstance(v, wanted) and not isinstance(v, bool)]
        pool += [
            v
            for program in self.suite.reference(task)
            for call in program
            for v in (*call.positional, *call.arguments.values())
            if isinstance(v, wanted) and not isinstance(v, bool)
        ]
        return rng.choice(pool) if pool else rng.choice(("x", 1))

    def files(self, task, turns, rng):
        """Folders and files made, copied (folders share their files then), moved (into themselves, too) and removed."""
        if "GorillaFileSystem" not in task.domains:
            return False
        names = [v for v in self._values[task.id] if isinstance(v, str) and 0 < len(v) < 25 and " " not in v]
        names = ["new", ".", "..", "/", *dict.fromkeys(names)]

        def one():
            a, b = rng.choice(names), rng.choice(names)
            return rng.choice(
                (
                    Call("cd", {"folder": a}),
                    Call("mkdir", {"dir_name": a}),
                    Call("touch", {"file_name": a}),
                    Call("cp", {"source": a, "destination": b}),
                    Call("mv", {"source": a, "destination": b}),
                    Call("rm", {"file_name": a}),
                    Call("rmdir", {"dir_name": a}),
                    Call("echo", {"content": b, "file_name": a}),
                    Call("find", {"path": a, "name": b}),
                    Call("ls", {"a": True}),
                )
            )

        return _insert(turns, rng, *(one() for _ in range(rng.randint(1, 6))))

    def no_argument(self, task, turns, rng):
        def change(call, rng):
            if not call.arguments:
                return None
            lost = rng.choice(list(call.arguments))
            return Call(call.name, {k: v for k, v in call.arguments.items() if k != lost}, call.positional)

        return _change(turns, rng, change)

    def odd_argument(self, task, turns, rng):
        name = rng.choice(ODD_PARAMETERS)
        return _change(turns, rng, lambda call, rng: Call(call.name, {**call.arguments, name: 1}, call.positional))

    def positional(self, task, turns, rng):
        def change(call, rng):
            names = [n for n in self._parameters(task, call.name) if n in call.arguments]
            k = rng.randint(0, len(names))
            if call.positional or list(self._parameters(task, call.name))[:k] != names[:k]:
                return None
            rest = {n: v for n, v in call.arguments.items() if n not in names[:k]}
            extra = (1,) if rng.random() < 0.15 else ()
            return Call(call.name, rest, (*(call.arguments[n] for n in names[:k]), *extra))

        return _change(turns, rng, change)

    def _parameters(self, task, name):
        return self._docs[task.id].get(name, {"parameters": {"properties": {}}})["parameters"]["properties"]

    def empty_step(self, task, turns, rng):
        turn = rng.choice(turns)
        turn.insert(rng.randrange(len(turn) + 1), [])

    def recut(self, task, turns, rng):
        for turn in turns:
            turn[:] = _cut([call for step in turn for call in step], rng)

    def fewer_turns(self, task, turns, rng):
        del turns[rng.randrange(len(turns)) :]

    def more_turns(self, task, turns, rng):
        turns += [[[Call("pwd")]] if rng.random() < 0.5 else [] for _ in range(rng.randint(1, 3))]

    def source(self, task, turns, rng):
        """An argument that a decoder leaves as source, because it reads as a call or a name."""

        def change(value, rng):
            call = self._any_call(task, rng)
            simple = {k: v for k, v in call.arguments.items() if isinstance(v, str | int | float)}
            if any("(" in str(v) for v in simple.values()):
                return value
            odd = ("nan", "no_such(x=1)", "{'a': pwd()}", "pwd", "'broken", "1 +")
            return Unevaluated(rng.choice((str(Call(call.name, simple)), str(Call(call.name, simple)), *odd)))

        return _change_value(turns, rng, change, keyword=True)

    # Slips that only the official quirks judge as officially.
    def call_like(self, task, turns, rng):
        def change(value, rng):
            text = rng.choice((*CALL_LIKE, f"{rng.choice(sorted(self._docs[task.id]))} (it)"))
            return f"{value} {text}" if isinstance(value, str) and rng.random() < 0.5 else text

        return _change_value(turns, rng, change)

    def blank_name(self, task, turns, rng):
        def change(call, rng):
            if call.arguments and rng.random() < 0.5:
                return Call(call.name, {f" {k}": v for k, v in call.arguments.items()}, call.positional)
            return Call(rng.choice((f"{call.name} ", f" {call.name}")), call.arguments, call.positional)

        return _change(turns, rng, change)

    def normalised_name(self, task, turns, rng):
        def wide(name):
            return name[:1] + "".join(chr(ord(c) + 0xFEE0) if c.isascii() and c.isalpha() else c for c in name[1:])

        def change(call, rng):
            if call.arguments and rng.random() < 0.8:
                return Call(call.name, {wide(k): v for k, v in call.arguments.items()}, call.positional)
            return Call(wide(call.name), call.arguments, call.positional)

        return _change(turns, rng, change)

    def endless_number(self, task, turns, rng):
        return _change_value(turns, rng, lambda value, rng: rng.choice((math.inf, -math.inf, math.nan, [math.inf])))

    def deep(self, task, turns, rng):
        def change(value, rng):
            for _ in range(rng.choice((50, 198, 199, 200, 300))):
                value = [value]
            return value

        return _change_value(turns, rng, change)

    def shared(self, task, turns, rng):
        """Changes of what the official checker shares between policy and reference."""
        if "TwitterAPI" in task.domains:
            tweet = rng.choice((0, 1, 5, 10))
            calls = [
                Call("post_tweet", {"content": "hello"}),
                Call("mention", {"tweet_id": tweet, "mentioned_usernames": ["@ann"]}),
                Call("post_tweet", {"content": "again", "tags": ["#a"]}),
            ]
            return _insert(turns, rng, *calls[: rng.randint(1, 3)])
        if "TravelAPI" in task.domains and task.category == "long_context":
            from bfcl_eval.eval_checker.multi_turn_eval.func_source_code import long_context

            token = self.suite._entry(task).scenarios["TravelAPI"].get("access_token", "x")
            booking = rng.choice(sorted(long_context.BOOKING_RECORD_EXTENSION))
            card = rng.choice(sorted(long_context.CREDIT_CARD_EXTENSION))
            book = {
                "access_token": token,
                "card_id": card,
                "travel_date": "2024-11-11",
                "travel_from": "SFO",
                "travel_to": "LAX",
                "travel_class": "economy",
                "travel_cost": 10.0,
            }
            return _insert(
                turns,
                rng,
                rng.choice(
                    (
                        Call("cancel_booking", {"access_token": token, "booking_id": booking}),
                        Call("book_flight", book),
                        Call(
                            "purchase_insurance",
                            {
                                "access_token": token,
                                "insurance_type": "travel",
                                "booking_id": booking,
                                "insurance_cost": 1.0,
                                "card_id": card,
                            },
                        ),
                        Call("get_credit_card_balance", {"access_token": token, "card_id": card}),
                    )
                ),
            )
        return False


#: Slip → (its method, weight).
SLIPS = {
    name: (getattr(Family, name), weight)
    for name, weight in {
        "drop": 3,
        "double": 3,
        "double_turn": 1,
        "reorder": 2,
        "move": 2,
        "swap_turns": 0.5,
        "act_early": 2,
        "empty_turn": 0.7,
        "swap_arguments": 2,
        "swap_two_of_one_call": 1,
        "retype": 3,
        "odd_value": 2,
        "odd_text": 2,
        "nested": 1,
        "wrong_id": 2,
        "value_of_the_world": 2,
        "huge": 1,
        "unknown_tool": 2,
        "other_tool": 2,
        "other_tasks_calls": 1.5,
        "look": 3,
        "any_tool": 6,
        "files": 5,
        "no_argument": 1.5,
        "odd_argument": 1.5,
        "positional": 2,
        "empty_step": 1,
        "recut": 1,
        "fewer_turns": 0.5,
        "more_turns": 0.5,
        "source": 1.5,
        "call_like": 2,
        "blank_name": 1,
        "normalised_name": 0.7,
        "endless_number": 1,
        "deep": 0.7,
        "shared": 4,
    }.items()
}


def _cut(calls: list[Call], rng: random.Random) -> list[list[Call]]:
    """A turn's calls as steps: all in one, one each, or cut once."""
    if not calls:
        return []
    how = rng.randrange(3)
    if how == 0:
        return [calls]
    if how == 1:
        return [[call] for call in calls]
    at = rng.randrange(len(calls) + 1)
    return [step for step in (calls[:at], calls[at:]) if step]


def _anywhere(turns, rng):
    places = [(step, i) for turn in turns for step in turn for i in range(len(step))]
    return rng.choice(places) if places else None


def _insert(turns, rng, *calls):
    turn = rng.choice(turns)
    if turn and rng.random() < 0.5:
        step = rng.choice(turn)
        at = rng.randrange(len(step) + 1)
        step[at:at] = calls
    else:
        turn.insert(rng.randrange(len(turn) + 1), list(calls))


def _change(turns, rng, change):
    where = _anywhere(turns, rng)
    if where is None:
        return False
    step, i = where
    changed = change(step[i], rng)
    if changed is None:
        return False
    step[i] = changed


def _change_value(turns, rng, change, heavy=True, keyword=False):
    def one(call, rng):
        if call.name in HEAVY and not heavy:
            return None
        if keyword and not call.arguments:
            return None
        if call.positional and not keyword and (not call.arguments or rng.random() < 0.5):
            at = rng.randrange(len(call.positional))
            values = list(call.positional)
            values[at] = change(values[at], rng)
            return Call(call.name, call.arguments, tuple(values))
        if not call.arguments:
            return None
        name = rng.choice(list(call.arguments))
        value = call.arguments[name]
        if isinstance(value, list) and value and not keyword and rng.random() < 0.5:
            at = rng.randrange(len(value))
            return Call(
                call.name,
                {**call.arguments, name: [*value[:at], change(value[at], rng), *value[at + 1 :]]},
                call.positional,
            )
        return Call(call.name, {**call.arguments, name: change(value, rng)}, call.positional)

    return _change(turns, rng, one)


def _retyped(value, rng):
    if isinstance(value, bool):
        return rng.choice((int(value), str(value), float(value), None))
    if isinstance(value, int):
        return rng.choice((float(value), str(value), [value], bool(value)))
    if isinstance(value, float):
        return rng.choice((str(value), int(value) if math.isfinite(value) else 0, [value], -value))
    if isinstance(value, str):
        return rng.choice(([value], {"value": value}, None, len(value), int(value) if value.isdecimal() else True))
    if isinstance(value, list):
        return rng.choice(
            (value[0] if value else None, str(value), {str(i): v for i, v in enumerate(value)}, value * 2)
        )
    return rng.choice((str(value), [value], None))


def _scalars(value) -> Iterator[object]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _scalars(item)
    elif isinstance(value, list):
        for item in value:
            yield from _scalars(item)
    elif value is not None:
        yield value


# --- judgement --------------------------------------------------------------------------------------------------------
def judgement(played_index: int | str, verdict: Verdict) -> str:
    """One line: the verdict and both sets of labels."""
    return " ".join((str(played_index), verdict.reason, *diagnose(verdict).names, "|", *release_labels(verdict)))


def judgements(family: Family, indices: Sequence[int]) -> dict[int, str]:
    verifier = Verifier(family.suite)
    out = {}
    for i in indices:
        played = family[i]
        out[i] = judgement(i, verifier.verify(played.task, played.turns))
    return out


if __name__ == "__main__":
    seed, start, stop, quirks = map(int, sys.argv[1:])
    family = Family(make_suite("bfcl", official_quirks=bool(quirks)), seed)  # type: ignore[arg-type]
    print("\n".join(judgements(family, range(start, stop)).values()))
