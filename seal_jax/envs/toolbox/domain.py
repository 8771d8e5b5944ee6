"""What every kind of domain is made of: roles (documented tools), a stateful instance, intents and their refusals.

A kind is a subclass of `Domain` with one method per role, written in canonical argument names. `instance_class(skin)`
makes from it a class whose methods carry the skin's tool and argument names with a true signature, so whatever calls
bound methods and reads `inspect.signature` (the general execution layer does) sees ordinary Python tools.

Public attributes of an instance are the state that is verified; attributes with a leading underscore are hidden.
A result is a dict; a refusal is `{"error": "<entity> <what is wrong>"}` and never changes any state.
"""

from __future__ import annotations

import functools
import inspect
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from seal_jax.envs.toolbox.skins import Skin
from seal_jax.types import Call, ToolDoc


# --- tools -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Arg:
    """One argument of a role: canonical `key` (the method's parameter) and `meaning` (how the skin names it)."""

    key: str
    meaning: str
    type: str = "string"  # "string" | "integer" | "boolean"
    choices: str = ""  # the skin's enum of this meaning, "" if free
    required: bool = True
    doc: str = ""  # format string over the skin's nouns


@dataclass(frozen=True)
class Role:
    """One tool of a kind, before it is dressed. `doc` is a format string over the skin's nouns and status words."""

    key: str
    doc: str
    args: tuple[Arg, ...]
    mutates: bool = True


@dataclass(frozen=True)
class RoleCall:
    """A call in canonical names; only given arguments are present, in the role's order."""

    role: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Gap:
    """One way to leave a value out of an intent: the vague sentence, and the sentence that supplies the value later."""

    key: str  # canonical argument (of the intent's last call) that is missing
    vague: str
    supply: str


@dataclass(frozen=True)
class Intent:
    """One wish of the user: its sentence, the calls that meet it (look-ups first), and what `miss_*` may take away."""

    text: str
    calls: tuple[RoleCall, ...]
    gaps: tuple[Gap, ...] = ()
    holdable: bool = True  # may the last call's tool be the held-out one of miss_func


# --- instances -------------------------------------------------------------------------------------------------------
class Domain:
    """Base of all kinds. `state` maps attribute names (public and hidden) to plain data, which is copied."""

    kind: ClassVar[str]
    roles: ClassVar[tuple[Role, ...]]

    def __init__(self, skin: Skin, state: Mapping[str, Any]) -> None:
        self._skin = skin
        for name, value in state.items():
            setattr(self, name, _copied(value))

    # what a kind must say about itself ---------------------------------------------------------------------------
    @classmethod
    def initial(cls, skin: Skin, rng: random.Random) -> dict[str, Any]:
        """A state without any trouble, with its distractors under `_padding`."""
        raise NotImplementedError

    @classmethod
    def draw(cls, skin: Skin, state: Mapping[str, Any], rng: random.Random, said: list[Intent]) -> Intent | None:
        """One more intent after those already said; None if this draw leads nowhere (the caller draws again)."""
        raise NotImplementedError

    @classmethod
    def troubles(cls, state: Mapping[str, Any], said: Sequence[Intent]) -> list[Callable[[dict[str, Any]], None]]:
        """Changes of the initial state that make a tool refuse on the way of these intents."""
        raise NotImplementedError

    @classmethod
    def settle(cls, state: dict[str, Any], said: Sequence[Intent]) -> None:
        """Adapts the initial state to what the user will say (nothing, for most kinds)."""

    def repair(self, call: RoleCall) -> RoleCall | None:
        """The call that removes the first obstacle this call would meet now; None when nothing is in its way."""
        raise NotImplementedError

    # helpers for kinds -------------------------------------------------------------------------------------------
    def _error(self, text: str) -> dict[str, Any]:
        return {"error": text}

    def _found(self, entries: Mapping[str, str], key: str) -> dict[str, Any]:
        """The look-up result {name: id}, with distractors around it in a long-context world."""
        padding: Mapping[str, Sequence[Sequence[str]]] = getattr(self, "_padding", {})
        pairs = [*entries.items()]
        for i, (name, id_) in enumerate(padding.get(key, ())):
            pairs.insert(0 if i % 2 else len(pairs), (name, id_))
        return dict(pairs)


def _copied(value: Any) -> Any:
    """A copy of plain data (dicts, lists and what never changes); much faster than copy.deepcopy."""
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    return [_copied(v) for v in value] if isinstance(value, list) else value


def _tool(method: Callable[..., Any], role: Role, skin: Skin) -> Callable[..., Any]:
    names = {skin.arguments[a.meaning]: a for a in role.args}
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    for name, a in names.items():
        default = inspect.Parameter.empty if a.required else None
        parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
    signature = inspect.Signature(parameters)

    def tool(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        return method(bound.pop("self"), **{names[name].key: value for name, value in bound.items()})

    tool.__name__ = tool.__qualname__ = skin.tools[role.key]
    tool.__signature__ = signature  # type: ignore[attr-defined]
    return tool


def instance_class(base: type[Domain], skin: Skin) -> type[Domain]:
    """A subclass of `base` whose methods are the skin's tools (built once per skin)."""
    cached: Any = _instance_class
    return cached(base, skin)


@functools.lru_cache(maxsize=256)
def _instance_class(base: Any, skin: Skin) -> Any:
    tools = {skin.tools[r.key]: _tool(getattr(base, r.key), r, skin) for r in base.roles}
    return type(f"{base.__name__}_{skin.name}", (base,), tools)


# --- from canonical to dressed ---------------------------------------------------------------------------------------
def dress(base: type[Domain], skin: Skin, call: RoleCall) -> Call:
    """A canonical call in the skin's names."""
    role = role_of(base, call.role)
    return Call(
        skin.tools[role.key], {skin.arguments[a.meaning]: call.args[a.key] for a in role.args if a.key in call.args}
    )


def undress(base: type[Domain], skin: Skin, call: Call) -> RoleCall | None:
    """The canonical form of a call; None for a tool that is not of this skin."""
    for role in base.roles:
        if skin.tools[role.key] == call.name:
            keys = {skin.arguments[a.meaning]: a.key for a in role.args}
            return RoleCall(role.key, {keys[name]: value for name, value in call.arguments.items() if name in keys})
    return None


def tool_doc(base: type[Domain], skin: Skin, role: Role) -> ToolDoc:
    """The JSON document of one tool: name, description, parameters with types, enums and required names."""
    words = _words(skin)
    properties: dict[str, Any] = {}
    for a in role.args:
        schema: dict[str, Any] = {"type": a.type}
        if a.doc:
            schema["description"] = _articles(a.doc.format(**words))
        if a.choices:
            schema["enum"] = list(skin.choices[a.choices])
        properties[skin.arguments[a.meaning]] = schema
    return {
        "name": skin.tools[role.key],
        "description": _articles(role.doc.format(**words)),
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": [skin.arguments[a.meaning] for a in role.args if a.required],
        },
    }


def _words(skin: Skin) -> dict[str, str]:
    return {**skin.nouns, **skin.status, **{f"arg_{k}": v for k, v in skin.arguments.items()}}


def phrase(skin: Skin, rng: random.Random, templates: Sequence[str], **values: Any) -> str:
    """One of the templates, filled with the skin's words and the values."""
    return _articles(rng.choice(templates).format(**_words(skin), **values))


def _articles(text: str) -> str:
    return re.sub(r"\ba (?=[aeio])", "an ", text)


def draw_ids(rng: random.Random, letters: str, n: int) -> list[str]:
    """`n` different ids of one letter and one digit 1..9."""
    return rng.sample([f"{letter}{digit}" for letter in letters for digit in range(1, 10)], n)


def role_of(base: type[Domain], key: str) -> Role:
    return next(r for r in base.roles if r.key == key)
