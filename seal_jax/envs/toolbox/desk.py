"""Kind "desk": tickets behind a log-in. Nothing works without a session; a closed ticket refuses work."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from seal_jax.envs.toolbox.domain import Arg, Domain, Gap, Intent, Role, RoleCall, draw_ids, phrase
from seal_jax.envs.toolbox.skins import Skin
from seal_jax.envs.toolbox.words import ID_LETTERS, NAMES, NOTES

_ID = Arg("id", "id", doc="{entity}")


class Desk(Domain):
    """State: the session, number of log-ins; status, owner, notes and number of reopenings by ticket id."""

    kind = "desk"
    roles = (
        Role("login", "start the session of a {user}", (Arg("who", "who", doc="{user}"),)),
        Role("find", "look up the {arg_id} of a {entity}", (Arg("topic", "topic", doc="{entity}"),), mutates=False),
        Role("note", "add a note to a {entity}",
             (_ID, Arg("text", "text"), Arg("urgency", "urgency", choices="urgency", required=False))),
        Role("assign", "change the person of a {entity}", (_ID, Arg("who", "who", doc="new person"))),
        Role("reopen", "open a {closed} {entity}", (_ID,)),
        Role("close", "mark a {entity} as {closed}", (_ID,)),
        Role("show", "tell the person of a {entity}", (_ID,), mutates=False),
    )  # fmt: skip

    session: str
    logins: int
    states: dict[str, str]
    owners: dict[str, str]
    notes: dict[str, list[list[str]]]
    reopenings: dict[str, int]
    _user: str
    _ids: dict[str, str]

    # --- tools ---------------------------------------------------------------------------------------------------
    def login(self, who: str) -> dict[str, Any]:
        if who != self._user:
            return self._error(f"no {self._skin.nouns['user']} {who}")
        self.session = who
        self.logins += 1
        return {self._skin.nouns["user"]: who}

    def find(self, topic: str) -> dict[str, Any]:
        if refused := self._no_session():
            return refused
        if topic not in self._ids:
            return self._error(f"no {topic} {self._skin.nouns['entity']}")
        return self._found({topic: self._ids[topic]}, topic)

    def note(self, id: str, text: str, urgency: str | None = None) -> dict[str, Any]:
        if refused := self._no_session() or self._refuse(id):
            return refused
        self.notes[id].append([text, self._skin.choices["urgency"][0] if urgency is None else urgency])
        return {id: text}

    def assign(self, id: str, who: str) -> dict[str, Any]:
        if refused := self._no_session() or self._refuse(id):
            return refused
        self.owners[id] = who
        return {id: who}

    def reopen(self, id: str) -> dict[str, Any]:
        if refused := self._no_session() or self._absent(id):
            return refused
        self.states[id] = "open"
        self.reopenings[id] += 1
        return {id: "open"}

    def close(self, id: str) -> dict[str, Any]:
        if refused := self._no_session() or self._refuse(id):
            return refused
        self.states[id] = "closed"
        return {id: self._skin.status["closed"]}

    def show(self, id: str) -> dict[str, Any]:
        return self._no_session() or self._absent(id) or {self._skin.arguments["who"]: self.owners[id]}

    # --- refusals ------------------------------------------------------------------------------------------------
    def _no_session(self) -> dict[str, Any] | None:
        if self.session:
            return None
        return self._error(f"{self._skin.nouns['user']} {self._user} is {self._skin.status['absent']}")

    def _absent(self, id: str) -> dict[str, Any] | None:
        return None if id in self.states else self._error(f"no {self._skin.nouns['entity']} {id}")

    def _refuse(self, id: str) -> dict[str, Any] | None:
        if refused := self._absent(id):
            return refused
        if self.states[id] == "open":
            return None
        return self._error(f"{self._skin.nouns['entity']} {id} is {self._skin.status['closed']}")

    def repair(self, call: RoleCall) -> RoleCall | None:
        if call.role == "login":
            return None
        if not self.session:
            return RoleCall("login", {"who": self._user})
        id_ = call.args.get("id")
        if call.role in ("note", "assign", "close") and id_ in self.states and self.states[id_] != "open":
            return RoleCall("reopen", {"id": id_})
        return None

    # --- generation ----------------------------------------------------------------------------------------------
    @classmethod
    def initial(cls, skin: Skin, rng: random.Random) -> dict[str, Any]:
        topics = rng.sample(skin.names, 12)
        ids = draw_ids(rng, ID_LETTERS, 12)
        own = ids[:4]
        user, *owners = rng.sample(NAMES["people"], 5)
        return {
            "session": user,
            "logins": 0,
            "states": dict.fromkeys(own, "open"),
            "owners": dict(zip(own, owners, strict=True)),
            "notes": {i: [] for i in own},
            "reopenings": dict.fromkeys(own, 0),
            "_user": user,
            "_ids": dict(zip(topics[:4], own, strict=True)),
            "_padding": {t: [(topics[j], ids[j]) for j in rng.sample(range(4, 12), 3)] for t in topics[:4]},
        }

    @classmethod
    def draw(cls, skin: Skin, state: Mapping[str, Any], rng: random.Random, said: list[Intent]) -> Intent | None:
        ids: Mapping[str, str] = state["_ids"]
        if not said and rng.random() < 0.25:
            u = state["_user"]
            text = phrase(skin, rng, ("log in {u}.", "start the session of {u}.", "let {u} log in."), u=u)
            return Intent(text, (RoleCall("login", {"who": u}),), holdable=False)
        sort = rng.choice(("note", "note", "note", "assign", "assign", "close", "show"))
        t = rng.choice(sorted(ids))
        id_ = ids[t]
        if any(i.calls[-1].role == "close" and i.calls[-1].args["id"] == id_ for i in said):
            return None  # work on what was just closed would need a reopening that the user did not wish
        p = rng.choice([n for n in NAMES["people"] if n not in (state["_user"], state["owners"][id_])])
        w = rng.choice(NOTES)
        look = RoleCall("find", {"topic": t})
        say = partial(phrase, skin, rng, t=t, p=p, w=w)
        which = Gap("id", "", say(("i mean {t}.", "the {t} one.", "it is {t}.")))
        if sort == "note":
            high = rng.random() < 0.35
            h = skin.choices["urgency"][-1]
            args = {"id": id_, "text": w} | ({"urgency": h} if high else {})
            how = phrase(skin, rng, (" make it {h}.", " it is {h}."), h=h) if high else ""
            return Intent(
                say(("note {w} on the {t} {entity}.", "add {w} to the {t} {entity}.", "write {w} on the {t} {entity}."))
                + how,
                (look, RoleCall("note", args)),
                (
                    Gap("text", say(("add a note to the {t} {entity}.", "write on the {t} {entity}.")) + how,
                        say(("write {w}.", "say {w}.", "just {w}."))),
                    Gap("id", say(("note {w} on the {entity}.", "add {w} to a {entity}.")) + how, which.supply),
                ),
            )  # fmt: skip
        if sort == "assign":
            return Intent(
                say(("give the {t} {entity} to {p}.", "hand the {t} {entity} to {p}.", "let {p} do the {t} {entity}.")),
                (look, RoleCall("assign", {"id": id_, "who": p})),
                (
                    Gap("who", say(("give the {t} {entity} away.", "hand the {t} {entity} to someone.")),
                        say(("to {p}.", "i mean {p}.", "{p} please."))),
                    Gap("id", say(("give the {entity} to {p}.", "hand a {entity} to {p}.")), which.supply),
                ),
            )  # fmt: skip
        if sort == "close":
            return Intent(
                say(("close the {t} {entity}.", "the {t} {entity} is over.", "end the {t} {entity}.")),
                (look, RoleCall("close", {"id": id_})),
                (Gap("id", say(("close the {entity}.", "end a {entity}.")), which.supply),),
            )
        return Intent(
            say(("who has the {t} {entity}?", "tell me the person of the {t} {entity}.")),
            (look, RoleCall("show", {"id": id_})),
            (Gap("id", say(("who has the {entity}?", "tell me the person of the {entity}.")), which.supply),),
        )

    @classmethod
    def troubles(cls, state: Mapping[str, Any], said: Sequence[Intent]) -> list[Callable[[dict[str, Any]], None]]:
        touched = [i.calls[-1].args["id"] for i in said if i.calls[-1].role in ("note", "assign", "close")]
        found: list[Callable[[dict[str, Any]], None]] = [partial(_close, id_=id_) for id_ in dict.fromkeys(touched)]
        if said[0].calls[-1].role != "login":
            found.append(_log_out)
        return found

    @classmethod
    def settle(cls, state: dict[str, Any], said: Sequence[Intent]) -> None:
        """Whoever asks to be logged in is not logged in yet."""
        if said[0].calls[-1].role == "login":
            _log_out(state)


def _close(state: dict[str, Any], id_: str) -> None:
    state["states"][id_] = "closed"


def _log_out(state: dict[str, Any]) -> None:
    state["session"] = ""
