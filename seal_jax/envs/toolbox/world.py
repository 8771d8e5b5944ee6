"""One live toolbox world: checks a call against the tool's document, then runs it on the instance.

Every result, also of a call that was never run, is a JSON string. All errors:

| error kind | text |
|---|---|
| `unknown_tool` | `{"error": "no tool x_y"}` |
| `unexpected_argument` | `{"error": "x_y has no mode"}` |
| `missing_argument` | `{"error": "x_y needs amount"}` |
| `argument_type` | `{"error": "amount must be an integer"}`, `{"error": "mode must be slow or fast"}`; also: too long |
| `tool_error` | the tool's own refusal: `{"error": "account k7 is frozen"}` |

`detail` names the offending argument (or the unknown tool).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from seal_jax.envs.snapshot import public_attributes
from seal_jax.envs.toolbox.domain import Domain
from seal_jax.types import Call, CallResult, ErrorKind, ToolDoc

_TYPES = {"string": (str, "a string"), "integer": (int, "an integer"), "boolean": (bool, "true or false")}
#: No honest value comes near these; they bound what a policy can make a result or a state hold.
_MAX_TEXT, _MAX_INTEGER = 200, 10**9


class ToolboxWorld:
    """One instance and the documents of all its tools (revealed or not)."""

    def __init__(self, name: str, instance: Domain, docs: Sequence[ToolDoc]) -> None:
        self._name = name
        self._instance = instance
        self._docs: Mapping[str, ToolDoc] = {doc["name"]: doc for doc in docs}

    def tool_names(self) -> frozenset[str]:
        return frozenset(self._docs)

    def state(self) -> Mapping[str, Mapping[str, Any]]:
        """The live public attributes (not copies)."""
        return {self._name: public_attributes(self._instance)}

    def call(self, call: Call) -> CallResult:
        doc = self._docs.get(call.name)
        if doc is None:
            return _failed(call, "unknown_tool", f"no tool {call.name}", call.name)
        properties: Mapping[str, Any] = doc["parameters"]["properties"]
        if len(call.positional) > len(properties):
            return _failed(call, "unexpected_argument", f"{call.name} has {len(properties)} arguments", "")
        arguments = dict(zip(properties, call.positional, strict=False))
        for name, value in call.arguments.items():
            if name not in properties or name in arguments:
                return _failed(call, "unexpected_argument", f"{call.name} has no {name}", name)
            arguments[name] = value
        for name in doc["parameters"]["required"]:
            if name not in arguments:
                return _failed(call, "missing_argument", f"{call.name} needs {name}", name)
        for name, value in arguments.items():
            wanted = _mismatch(value, properties[name])
            if wanted:
                return _failed(call, "argument_type", f"{name} must be {wanted}", name)
        try:
            result = getattr(self._instance, call.name)(**arguments)
        except Exception as error:  # a bug of the world: it must neither end a rollout nor be charged to the policy
            return _failed(call, "env_error", f"{type(error).__name__}: {error}", "")
        if "error" in result:
            return _failed(call, "tool_error", result["error"], "")
        return CallResult(call, json.dumps(result))


def _mismatch(value: Any, spec: Mapping[str, Any]) -> str:
    """What the value should have been, or "" if it is that. A bool is no integer."""
    python_type, words = _TYPES[spec["type"]]
    if not isinstance(value, python_type) or (isinstance(value, bool) and python_type is not bool):
        return words
    if isinstance(value, str) and len(value) > _MAX_TEXT:
        return f"at most {_MAX_TEXT} characters"
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        return f"at most {_MAX_INTEGER}"
    if "enum" in spec and value not in spec["enum"]:
        *most, last = spec["enum"]
        return f"{', '.join(most)} or {last}" if most else last
    return ""


def _failed(call: Call, kind: ErrorKind, text: str, detail: str) -> CallResult:
    return CallResult(call, json.dumps({"error": text[:_MAX_TEXT]}), kind, detail[:_MAX_TEXT])
