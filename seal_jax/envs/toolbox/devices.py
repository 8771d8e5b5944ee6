"""Kind "devices": places with several devices each. One look-up names them all; off or locked ones refuse work."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from seal_jax.envs.toolbox.domain import Arg, Domain, Gap, Intent, Role, RoleCall, draw_ids, phrase
from seal_jax.envs.toolbox.skins import Skin
from seal_jax.envs.toolbox.words import DEVICES, ID_LETTERS

_ID = Arg("id", "id", doc="{entity}")


class Devices(Domain):
    """State: level, power ("off"/"on"), lock, timer, and how often each was switched or released, by id."""

    kind = "devices"
    roles = (
        Role("scan", "look up the {arg_id} of each {entity} in a {place}",
             (Arg("where", "where", doc="{place}"),), mutates=False),
        Role("level", "change the {arg_value} of a {entity}", (_ID, Arg("value", "value", "integer"))),
        Role("power", "start or stop a {entity}", (_ID, Arg("state", "state", choices="state"))),
        Role("release", "open a {locked} {entity}", (_ID,)),
        Role(
            "timer",
            "start a timer of a {entity}",
            (_ID, Arg("minutes", "minutes", "integer"), Arg("repeat", "repeat", "boolean", required=False)),
        ),
        Role("sense", "tell the {arg_value} of a {entity}", (_ID,), mutates=False),
    )  # fmt: skip

    levels: dict[str, int]
    power_states: dict[str, str]
    locks: dict[str, str]
    timers: dict[str, list[Any]]
    switched: dict[str, int]
    released: dict[str, int]
    _places: dict[str, dict[str, str]]
    _sorts: dict[str, str]

    # --- tools ---------------------------------------------------------------------------------------------------
    def scan(self, where: str) -> dict[str, Any]:
        if where not in self._places:
            return self._error(f"no {self._skin.nouns['place']} {where}")
        return self._found(self._places[where], where)

    def level(self, id: str, value: int) -> dict[str, Any]:
        if refused := self._refuse(id):
            return refused
        if not 0 <= value <= 99:
            return self._error(f"{self._skin.arguments['value']} must be 0 to 99")
        self.levels[id] = value
        return {id: value}

    def power(self, id: str, state: str) -> dict[str, Any]:
        if id not in self.levels:
            return self._absent(id)
        self.power_states[id] = "on" if state == self._on else "off"
        self.switched[id] += 1
        return {id: state}

    def release(self, id: str) -> dict[str, Any]:
        if id not in self.levels:
            return self._absent(id)
        self.locks[id] = "open"
        self.released[id] += 1
        return {id: "open"}

    def timer(self, id: str, minutes: int, repeat: bool = False) -> dict[str, Any]:
        if refused := self._refuse(id):
            return refused
        if minutes <= 0:
            return self._error(f"{self._skin.arguments['minutes']} must be above 0")
        self.timers[id] = [minutes, repeat]
        return {id: minutes}

    def sense(self, id: str) -> dict[str, Any]:
        return {self._skin.arguments["value"]: self.levels[id]} if id in self.levels else self._absent(id)

    # --- refusals ------------------------------------------------------------------------------------------------
    @property
    def _on(self) -> str:
        return self._skin.choices["state"][1]

    def _absent(self, id: str) -> dict[str, Any]:
        return self._error(f"no {self._skin.nouns['entity']} {id}")

    def _refuse(self, id: str) -> dict[str, Any] | None:
        if id not in self.levels:
            return self._absent(id)
        if self.locks[id] != "open":
            return self._error(f"{self._sorts[id]} {id} is {self._skin.status['locked']}")
        if self.power_states[id] != "on":
            return self._error(f"{self._sorts[id]} {id} is {self._skin.choices['state'][0]}")
        return None

    def repair(self, call: RoleCall) -> RoleCall | None:
        id_ = call.args.get("id")
        if call.role not in ("level", "timer") or id_ not in self.levels:
            return None
        if self.locks[id_] != "open":
            return RoleCall("release", {"id": id_})
        if self.power_states[id_] != "on":
            return RoleCall("power", {"id": id_, "state": self._on})
        return None

    # --- generation ----------------------------------------------------------------------------------------------
    @classmethod
    def initial(cls, skin: Skin, rng: random.Random) -> dict[str, Any]:
        places = rng.sample(skin.names, 3)
        ids = draw_ids(rng, ID_LETTERS, 15)
        sorts = [rng.sample(skin.devices, 2) for _ in places]
        layout = {p: dict(zip(sorts[i], ids[2 * i : 2 * i + 2], strict=True)) for i, p in enumerate(places)}
        own = ids[:6]
        others = {p: [d for d in DEVICES if d not in layout[p]] for p in places}
        return {
            "levels": {i: rng.randint(10, 99) for i in own},
            "power_states": dict.fromkeys(own, "on"),
            "locks": dict.fromkeys(own, "open"),
            "timers": {i: [] for i in own},
            "switched": dict.fromkeys(own, 0),
            "released": dict.fromkeys(own, 0),
            "_places": layout,
            "_sorts": {id_: sort for devices in layout.values() for sort, id_ in devices.items()},
            "_padding": {
                p: list(zip(rng.sample(others[p], 3), ids[6 + 3 * i : 9 + 3 * i], strict=True))
                for i, p in enumerate(places)
            },
        }

    @classmethod
    def draw(cls, skin: Skin, state: Mapping[str, Any], rng: random.Random, said: list[Intent]) -> Intent | None:
        places: Mapping[str, Mapping[str, str]] = state["_places"]
        sort = rng.choice(("level", "level", "level", "timer", "timer", "stop", "sense"))
        r = rng.choice(sorted(places))
        d = rng.choice(sorted(places[r]))
        id_, x = places[r][d], rng.randint(10, 59)
        stopped = {i.calls[-1].args["id"] for i in said if i.calls[-1].role == "power"}
        used = {i.calls[-1].args["id"] for i in said}
        if id_ in stopped or (sort == "stop" and id_ in used):
            return None  # stopping what just ran, or running what was just stopped, is no sensible wish
        look = RoleCall("scan", {"where": r})
        say = partial(phrase, skin, rng, r=r, d=d, x=x)
        if sort == "level":
            return Intent(
                say(("set the {d} in the {r} to {x}.", "put the {r} {d} at {x}.", "change the {r} {d} to {x}.")),
                (look, RoleCall("level", {"id": id_, "value": x})),
                (
                    Gap(
                        "value", say(("set the {d} in the {r}.", "change the {arg_value} of the {r} {d}.")), say(_MUCH)
                    ),
                    Gap("id", say(("set the {d} to {x}.", "put a {d} at {x}.")), say(_WHERE)),
                ),
            )
        if sort == "timer":
            daily = rng.random() < 0.35
            args = {"id": id_, "minutes": x} | ({"repeat": True} if daily else {})
            how = phrase(skin, rng, (" every day.", " each day.")) if daily else "."
            return Intent(
                say(("run the {r} {d} for {x} minutes", "start the {d} in the {r} for {x} minutes")) + how,
                (look, RoleCall("timer", args)),
                (
                    Gap("minutes", say(("run the {r} {d} for some minutes", "start a timer on the {r} {d}")) + how,
                        say(_MUCH)),
                    Gap("id", say(("run the {d} for {x} minutes", "start a {d} for {x} minutes")) + how, say(_WHERE)),
                ),
            )  # fmt: skip
        if sort == "stop":
            return Intent(
                say(("stop the {d} in the {r}.", "stop the {r} {d}.")),
                (look, RoleCall("power", {"id": id_, "state": skin.choices["state"][0]})),
                (Gap("id", say(("stop the {d}.", "stop a {d}.")), say(_WHERE)),),
            )
        return Intent(
            say(("what is the {arg_value} of the {r} {d}?", "tell me the {arg_value} of the {d} in the {r}.")),
            (look, RoleCall("sense", {"id": id_})),
            (
                Gap(
                    "id", say(("what is the {arg_value} of the {d}?", "tell me the {arg_value} of a {d}.")), say(_WHERE)
                ),
            ),
        )

    @classmethod
    def troubles(cls, state: Mapping[str, Any], said: Sequence[Intent]) -> list[Callable[[dict[str, Any]], None]]:
        touched = [i.calls[-1].args["id"] for i in said if i.calls[-1].role in ("level", "timer")]
        found: list[Callable[[dict[str, Any]], None]] = []
        for id_ in dict.fromkeys(touched):
            found += [partial(_stop, id_=id_), partial(_lock, id_=id_)]
        return found


_WHERE = ("in the {r}.", "i mean the {r}.", "the one in the {r}.")
_MUCH = ("make it {x}.", "{x} please.", "i mean {x}.")


def _stop(state: dict[str, Any], id_: str) -> None:
    state["power_states"][id_] = "off"


def _lock(state: dict[str, Any], id_: str) -> None:
    state["locks"][id_] = "locked"
