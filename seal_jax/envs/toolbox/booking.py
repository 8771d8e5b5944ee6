"""Kind "booking": search, reserve, confirm. Every reservation is a fresh hold whose id only its result tells; a hold
may expire before it is confirmed, and the index of an item may be stale."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from seal_jax.envs.toolbox.domain import Arg, Domain, Gap, Intent, Role, RoleCall, draw_ids, phrase
from seal_jax.envs.toolbox.skins import Skin
from seal_jax.envs.toolbox.words import ID_LETTERS

_ID = Arg("id", "id", doc="{entity}")
_HOLD = Arg("hold", "hold", doc="{ticket}")


class Booking(Domain):
    """State: stock by item id; reserved, ordered and renewed by hold id; refreshes by item name."""

    kind = "booking"
    roles = (
        Role("find", "look up the {arg_id} of a {entity}", (Arg("what", "what", doc="{entity}"),), mutates=False),
        Role("count", "tell how many of a {entity} are left", (_ID,), mutates=False),
        Role("reserve", "put a {entity} in a new {ticket}", (_ID, Arg("amount", "amount", "integer"))),
        Role("confirm", "pay for a {ticket}", (_HOLD, Arg("speed", "speed", choices="speed", required=False))),
        Role("cancel", "throw a {ticket} away", (_HOLD,)),
        Role("renew", "open a {expired} {ticket}", (_HOLD,)),
        Role("refresh", "load a {stale} {entity} again", (Arg("what", "what", doc="{entity}"),)),
    )

    stock: dict[str, int]
    reserved: dict[str, list[Any]]
    ordered: dict[str, str]
    renewed: dict[str, int]
    refreshed: dict[str, int]
    _ids: dict[str, str]
    _holds: dict[str, list[str]]  # the hold ids that an item's reservations get, in order
    _expired: list[str]  # hold ids that are found expired
    _stale: list[str]  # item names

    # --- tools ---------------------------------------------------------------------------------------------------
    def find(self, what: str) -> dict[str, Any]:
        entity = self._skin.nouns["entity"]
        if what not in self._ids:
            return self._error(f"no {entity} {what}")
        if what in self._stale:
            return self._error(f"{entity} {what} is {self._skin.status['stale']}")
        return self._found({what: self._ids[what]}, what)

    def count(self, id: str) -> dict[str, Any]:
        return {"left": self.stock[id]} if id in self.stock else self._absent("entity", id)

    def reserve(self, id: str, amount: int) -> dict[str, Any]:
        if id not in self.stock:
            return self._absent("entity", id)
        if not 0 < amount <= self.stock[id]:
            return self._error(f"{id} has only {self.stock[id]}")
        hold = next((h for h in self._holds[id] if h not in self.renewed), None)
        if hold is None:
            return self._error(f"{id} has no free {self._skin.nouns['ticket']}")
        self.stock[id] -= amount
        self.reserved[hold] = [id, amount]
        self.renewed[hold] = 0
        return {self._skin.arguments["hold"]: hold}

    def confirm(self, hold: str, speed: str | None = None) -> dict[str, Any]:
        if refused := self._refuse(hold):
            return refused
        del self.reserved[hold]
        self.ordered[hold] = self._skin.choices["speed"][0] if speed is None else speed
        return {"paid": hold}

    def cancel(self, hold: str) -> dict[str, Any]:
        if refused := self._refuse(hold):
            return refused
        id_, amount = self.reserved.pop(hold)
        self.stock[id_] += amount
        return {"left": self.stock[id_]}

    def renew(self, hold: str) -> dict[str, Any]:
        if hold not in self.reserved:
            return self._absent("ticket", hold)
        self.renewed[hold] += 1
        return {hold: "open"}

    def refresh(self, what: str) -> dict[str, Any]:
        if what not in self._ids:
            return self._error(f"no {self._skin.nouns['entity']} {what}")
        self.refreshed[what] = self.refreshed.get(what, 0) + 1
        self._stale = [name for name in self._stale if name != what]
        return {what: "open"}

    # --- refusals ------------------------------------------------------------------------------------------------
    def _absent(self, noun: str, id: str) -> dict[str, Any]:
        return self._error(f"no {self._skin.nouns[noun]} {id}")

    def _refuse(self, hold: str) -> dict[str, Any] | None:
        if hold not in self.reserved:
            return self._absent("ticket", hold)
        if hold in self._expired and not self.renewed[hold]:
            return self._error(f"{self._skin.nouns['ticket']} {hold} is {self._skin.status['expired']}")
        return None

    def repair(self, call: RoleCall) -> RoleCall | None:
        if call.role == "find" and call.args["what"] in self._stale:
            return RoleCall("refresh", {"what": call.args["what"]})
        hold = call.args.get("hold")
        if call.role in ("confirm", "cancel") and hold in self.reserved and self._refuse(hold):
            return RoleCall("renew", {"hold": hold})
        return None

    # --- generation ----------------------------------------------------------------------------------------------
    @classmethod
    def initial(cls, skin: Skin, rng: random.Random) -> dict[str, Any]:
        items = rng.sample(skin.names, 12)
        ids = draw_ids(rng, ID_LETTERS, 20)
        own = ids[:4]
        return {
            "stock": {i: rng.randint(40, 99) for i in own},
            "reserved": {},
            "ordered": {},
            "renewed": {},
            "refreshed": {},
            "_ids": dict(zip(items[:4], own, strict=True)),
            "_holds": {id_: ids[12 + 2 * i : 14 + 2 * i] for i, id_ in enumerate(own)},
            "_expired": [],
            "_stale": [],
            "_padding": {n: [(items[j], ids[j]) for j in rng.sample(range(4, 12), 3)] for n in items[:4]},
        }

    @classmethod
    def draw(cls, skin: Skin, state: Mapping[str, Any], rng: random.Random, said: list[Intent]) -> Intent | None:
        ids: Mapping[str, str] = state["_ids"]
        pending = _pending(state, said)
        sort = rng.choice(("settle", "settle", "settle", "drop") if pending and rng.random() < 0.7 else _FIRST)
        x = rng.randint(5, 19)
        fast = rng.choice(("", skin.choices["speed"][-1]))
        speed = {"speed": fast} if fast else {}
        if sort in ("settle", "drop"):
            n, hold = rng.choice(sorted(pending.items()))
            say = partial(phrase, skin, rng, n=n)
            if sort == "drop":
                text = say(("drop the {n}.", "i do not want the {n}.", "throw the {n} away."))
                return Intent(text, (RoleCall("cancel", {"hold": hold}),))
            how = phrase(skin, rng, (" use {fast}.", " make it {fast}."), fast=fast) if fast else ""
            text = say(("pay for the {n}.", "now buy the {n}.", "i take the {n}.")) + how
            return Intent(text, (RoleCall("confirm", {"hold": hold} | speed),))
        n = rng.choice(sorted(ids))
        if sum(n == c.args["what"] for i in said for c in i.calls if c.role == "find"):
            return None  # one reservation an item keeps its hold ids apart
        say = partial(phrase, skin, rng, n=n, x=x)
        look = RoleCall("find", {"what": n})
        which = say(("i mean {n}.", "the {n}.", "take {n}."))
        much = say(("make it {x}.", "{x} please.", "i mean {x}."))
        if sort == "count":
            return Intent(
                say(("how many {n} are left?", "count the {n}.", "tell me how many {n} are left.")),
                (look, RoleCall("count", {"id": ids[n]})),
                (Gap("id", say(("how many are left?", "count the {entity}.")), which),),
            )
        reserve = RoleCall("reserve", {"id": ids[n], "amount": x})
        if sort == "reserve":
            return Intent(
                say(("reserve {x} {n}.", "keep {x} {n} for me.", "put {x} {n} in a {ticket}.")),
                (look, reserve),
                (
                    Gap("amount", say(("reserve some {n}.", "keep {n} for me.", "put {n} in a {ticket}.")), much),
                    Gap("id", say(("reserve {x} for me.", "put {x} in a {ticket}.")), which),
                ),
            )
        how = phrase(skin, rng, (" use {fast}.", " make it {fast}."), fast=fast) if fast else ""
        return Intent(
            say(("buy {x} {n}.", "get and pay {x} {n}.", "order {x} {n}.")) + how,
            (look, reserve, RoleCall("confirm", {"hold": state["_holds"][ids[n]][0]} | speed)),
            (
                Gap("amount", say(("buy some {n}.", "order {n}.", "get and pay {n}.")) + how, much),
                Gap("id", say(("buy {x}.", "order {x} for me.")) + how, which),
            ),
        )

    @classmethod
    def troubles(cls, state: Mapping[str, Any], said: Sequence[Intent]) -> list[Callable[[dict[str, Any]], None]]:
        calls = [c for i in said for c in i.calls]
        found: list[Callable[[dict[str, Any]], None]] = []
        for c in calls:
            if c.role == "find":
                found.append(partial(_make_stale, name=c.args["what"]))
            if c.role in ("confirm", "cancel"):
                found += [partial(_expire, hold=c.args["hold"])] * 2
        return found


_FIRST = ("buy", "buy", "reserve", "reserve", "count")


def _pending(state: Mapping[str, Any], said: Sequence[Intent]) -> dict[str, str]:
    """Items reserved and neither paid nor dropped so far, with their hold."""
    open_: dict[str, str] = {}
    for intent in said:
        last = intent.calls[-1]
        if last.role == "reserve":
            name = next(n for n, id_ in state["_ids"].items() if id_ == last.args["id"])
            open_[name] = state["_holds"][last.args["id"]][0]
        elif last.role in ("confirm", "cancel"):
            open_ = {n: h for n, h in open_.items() if h != last.args["hold"]}
    return open_


def _make_stale(state: dict[str, Any], name: str) -> None:
    state["_stale"].append(name)


def _expire(state: dict[str, Any], hold: str) -> None:
    state["_expired"].append(hold)
