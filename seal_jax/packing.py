"""Records of `types.py` as bytes and back, exactly: how one process hands its episodes to the others.

JSON with a tag where JSON would forget something: {"Call": [fields]} is a record, {"tuple": [...]}, {"dict": [[key,
value], ...]}, {"source": text} an `Unevaluated`, {"literal": text} any other Python literal that a parsed call may hold
(bytes, a set, a complex number), {"int": hex} one too long for a decimal. Floats come back bit by bit (the shortest
decimal that names them is written), and so do NaN, infinities and lone surrogates.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from seal_jax import types

_RECORDS: Mapping[str, Any] = {
    name: value for name, value in vars(types).items() if isinstance(value, type) and is_dataclass(value)
}
_FIELDS = {name: tuple(field.name for field in fields(record)) for name, record in _RECORDS.items()}
#: Python refuses to read or write a longer decimal (sys.set_int_max_str_digits).
_LONG = 10**4000


def pack(value: Any) -> bytes:
    """UTF-8 JSON of records, tuples, lists, dicts and literals; TypeError naming the type of anything else."""
    return json.dumps(_out(value), separators=(",", ":")).encode("ascii")


def unpack(data: bytes) -> Any:
    """What `pack` was given: equal, and of the same types."""
    return _in(json.loads(data))


def _out(value: Any) -> Any:
    if value is None or type(value) in (bool, float, str):
        return value
    if type(value) is int:
        return value if abs(value) < _LONG else {"int": hex(value)}
    if isinstance(value, types.Unevaluated):
        return {"source": str.__str__(value)}
    if type(value) in (list, tuple):
        items = [_out(x) for x in value]
        return items if type(value) is list else {"tuple": items}
    if type(value).__name__ in _RECORDS and type(value) is _RECORDS[type(value).__name__]:
        return {type(value).__name__: [_out(getattr(value, field)) for field in _FIELDS[type(value).__name__]]}
    if isinstance(value, Mapping):
        return {"dict": [[_out(k), _out(v)] for k, v in value.items()]}
    text = repr(value)
    try:
        if ast.literal_eval(text) == value:
            return {"literal": text}
    except (ValueError, SyntaxError):
        pass
    raise TypeError(f"{type(value).__name__} cannot be handed to another process: {text[:80]}")


def _in(value: Any) -> Any:
    if isinstance(value, list):
        return [_in(x) for x in value]
    if not isinstance(value, dict):
        return value
    ((tag, inner),) = value.items()
    if tag == "tuple":
        return tuple(_in(x) if isinstance(x, (dict, list)) else x for x in inner)
    if tag == "dict":
        return {_in(k): _in(v) for k, v in inner}
    if tag == "source":
        return types.Unevaluated(inner)
    if tag == "int":
        return int(inner, 16)
    if tag == "literal":
        return ast.literal_eval(inner)
    return _RECORDS[tag](*(_in(x) for x in inner))
