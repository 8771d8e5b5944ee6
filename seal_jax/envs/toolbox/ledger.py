"""Kind "ledger": named holdings with an amount. A frozen holding refuses changes until it is thawed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from seal_jax.envs.toolbox.domain import Arg, Domain, Gap, Intent, Role, RoleCall, draw_ids, phrase
from seal_jax.envs.toolbox.skins import Skin
from seal_jax.envs.toolbox.words import ID_LETTERS

_ID = Arg("id", "id", doc="{entity}")


class Ledger(Domain):
    """State: amounts, states, thaws (how often each was thawed), plans and the service of its last transfer, by id."""

    kind = "ledger"
    roles = (
        Role("find", "look up the {arg_id} of a {entity}", (Arg("who", "who", doc="its name"),), mutates=False),
        Role("count", "tell the {unit} of a {entity}", (_ID,), mutates=False),
        Role("add", "add {unit} to a {entity}", (_ID, Arg("amount", "amount", "integer"))),
        Role(
            "move",
            "move {unit} to another {entity}",
            (
                Arg("source", "source", doc="{entity} to take from"),
                Arg("target", "target", doc="{entity} to give to"),
                Arg("amount", "amount", "integer"),
                Arg("speed", "speed", choices="speed", required=False),
            ),
        ),
        Role("thaw", "open a {frozen} {entity}", (_ID,)),
        Role("grade", "change the {arg_plan} of a {entity}", (_ID, Arg("plan", "plan", choices="plan"))),
    )

    amounts: dict[str, int]
    states: dict[str, str]
    thaws: dict[str, int]
    plans: dict[str, str]
    services: dict[str, str]
    _ids: dict[str, str]

    # --- tools ---------------------------------------------------------------------------------------------------
    def find(self, who: str) -> dict[str, Any]:
        if who not in self._ids:
            return self._error(f"no {self._skin.nouns['entity']} of {who}")
        return self._found({who: self._ids[who]}, who)

    def count(self, id: str) -> dict[str, Any]:
        return self._absent(id) or {self._skin.nouns["unit"]: self.amounts[id]}

    def add(self, id: str, amount: int) -> dict[str, Any]:
        if refused := self._absent(id) or self._refuse(id) or self._positive(amount):
            return refused
        self.amounts[id] += amount
        return {self._skin.nouns["unit"]: self.amounts[id]}

    def move(self, source: str, target: str, amount: int, speed: str | None = None) -> dict[str, Any]:
        refused = self._absent(source) or self._absent(target) or self._refuse(source) or self._refuse(target)
        if refused := refused or self._positive(amount):
            return refused
        if source == target:
            return self._error(f"{source} is both ends")
        if self.amounts[source] < amount:
            return self._error(f"{source} has only {self.amounts[source]}")
        self.amounts[source] -= amount
        self.amounts[target] += amount
        self.services[source] = self._skin.choices["speed"][0] if speed is None else speed
        return {"moved": amount}

    def thaw(self, id: str) -> dict[str, Any]:
        if refused := self._absent(id):
            return refused
        self.states[id] = "open"
        self.thaws[id] += 1
        return {id: "open"}

    def grade(self, id: str, plan: str) -> dict[str, Any]:
        if refused := self._absent(id) or self._refuse(id):
            return refused
        self.plans[id] = plan
        return {id: plan}

    # --- refusals ------------------------------------------------------------------------------------------------
    def _absent(self, id: str) -> dict[str, Any] | None:
        return None if id in self.amounts else self._error(f"no {self._skin.nouns['entity']} {id}")

    def _refuse(self, id: str) -> dict[str, Any] | None:
        if self.states[id] == "open":
            return None
        return self._error(f"{self._skin.nouns['entity']} {id} is {self._skin.status['frozen']}")

    def _positive(self, amount: int) -> dict[str, Any] | None:
        return None if amount > 0 else self._error(f"{self._skin.arguments['amount']} must be above 0")

    def repair(self, call: RoleCall) -> RoleCall | None:
        if call.role not in ("add", "move", "grade"):
            return None
        for key in ("id", "source", "target"):
            id_ = call.args.get(key)
            if id_ in self.states and self.states[id_] != "open":
                return RoleCall("thaw", {"id": id_})
        return None

    # --- generation ----------------------------------------------------------------------------------------------
    @classmethod
    def initial(cls, skin: Skin, rng: random.Random) -> dict[str, Any]:
        names = rng.sample(skin.names, 12)
        ids = draw_ids(rng, ID_LETTERS, 12)
        own, plan = ids[:4], skin.choices["plan"]
        return {
            "amounts": {i: rng.randint(60, 99) for i in own},
            "states": dict.fromkeys(own, "open"),
            "thaws": dict.fromkeys(own, 0),
            "plans": {i: rng.choice(plan) for i in own},
            "services": dict.fromkeys(own, ""),
            "_ids": dict(zip(names[:4], own, strict=True)),
            "_padding": {n: [(names[j], ids[j]) for j in rng.sample(range(4, 12), 3)] for n in names[:4]},
        }

    @classmethod
    def draw(cls, skin: Skin, state: Mapping[str, Any], rng: random.Random, said: list[Intent]) -> Intent | None:
        ids: Mapping[str, str] = state["_ids"]
        sort = rng.choice(("add", "add", "move", "move", "grade", "count"))
        a, b = rng.sample(sorted(ids), 2)
        x = rng.randint(5, 19)
        look = RoleCall("find", {"who": a})
        say = partial(phrase, skin, rng, a=a, b=b, x=x)
        if sort == "count":
            return Intent(
                say(("how many {unit} does {a} have?", "tell me the {unit} of {a}.", "count the {unit} of {a}.")),
                (look, RoleCall("count", {"id": ids[a]})),
                (Gap("id", say(("how many {unit} are in the {entity}?", "count the {unit}.")), say(_WHO)),),
            )
        if sort == "add":
            return Intent(
                say(("add {x} {unit} to {a}.", "give {a} {x} more {unit}.", "put {x} {unit} on {a}.")),
                (look, RoleCall("add", {"id": ids[a], "amount": x})),
                (
                    Gap("amount", say(("add some {unit} to {a}.", "give {a} more {unit}.")), say(_MUCH)),
                    Gap("id", say(("add {x} {unit}.", "put {x} {unit} on the {entity}.")), say(_WHO)),
                ),
            )
        if sort == "move":
            fast = rng.choice(("", *skin.choices["speed"][1:]))
            args = {"source": ids[a], "target": ids[b], "amount": x} | ({"speed": fast} if fast else {})
            how = phrase(skin, rng, (" use {fast}.", " make it {fast}."), fast=fast) if fast else ""
            return Intent(
                say(("move {x} {unit} from {a} to {b}.", "send {x} {unit} from {a} to {b}.")) + how,
                (look, RoleCall("find", {"who": b}), RoleCall("move", args)),
                (
                    Gap("amount", say(("move some {unit} from {a} to {b}.", "send {unit} from {a} to {b}.")) + how,
                        say(_MUCH)),
                    Gap("target", say(("move {x} {unit} from {a}.", "take {x} {unit} from {a} and send them.")) + how,
                        say(("to {b}.", "send it to {b}."))),
                ),
            )  # fmt: skip
        plan = rng.choice([p for p in skin.choices["plan"] if p != state["plans"][ids[a]]])
        return Intent(
            say(("set the {arg_plan} of {a} to {p}.", "make {a} {p}.", "change {a} to {p}."), p=plan),
            (look, RoleCall("grade", {"id": ids[a], "plan": plan})),
            (Gap("plan", say(("change the {arg_plan} of {a}.", "set a new {arg_plan} for {a}.")),
                 say(("make it {p}.", "take {p}."), p=plan)),),
        )  # fmt: skip

    @classmethod
    def troubles(cls, state: Mapping[str, Any], said: Sequence[Intent]) -> list[Callable[[dict[str, Any]], None]]:
        touched = [
            i.calls[-1].args[key]
            for i in said
            for key in ("id", "source", "target")
            if i.calls[-1].role != "count" and key in i.calls[-1].args
        ]
        return [partial(_freeze, id_=id_) for id_ in dict.fromkeys(touched)]


_WHO = ("i mean {a}.", "for {a}.", "it is {a}.")
_MUCH = ("make it {x}.", "{x} please.", "i mean {x}.")


def _freeze(state: dict[str, Any], id_: str) -> None:
    state["states"][id_] = "frozen"
