"""Executes tool calls on the live objects of one episode.

A call is a name and arguments, dispatched to a bound public method. No source text is ever built or evaluated, and no
object lives in a module global, so that two episodes cannot meet and a model's text cannot run (upstream bugs:
ShishirPatil/gorilla PR 1303, mlcommons/endpoints 392). What the policy reads and the verifier compares is nevertheless
character for character what BFCL's executor yields, including Python's own wording of argument errors.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import json
import math
import time
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from seal_jax.envs.limits import CallStuck, TimeLimitExceeded, run_limited
from seal_jax.envs.snapshot import public_attributes
from seal_jax.types import Call, CallResult, ErrorKind, Unevaluated

#: Names BFCL's executor refuses whatever the world offers.
DENIED_NAMES = frozenset({"kill", "exit", "quit", "remove", "unlink", "popen", "Popen", "run"})
TIME_LIMIT_S = 5.0
#: Characters. Ten times the longest answer of a long-context tool; beyond it no policy could read the result.
MAX_RESULT_CHARS = 1_000_000
#: What all calls on one world may take together, in limits of one call: a message may hold a hundred calls that each
#: stop just short of their limit. An honest episode needs a hundredth of either.
TIME_BUDGET, TEXT_BUDGET = 6, 32

#: Looks at the bound arguments of a call that could keep C code busy for ever; returns why it must not run, or None.
Guard = Callable[[Mapping[str, Any]], str | None]


class InstanceWorld:
    """A World (see base.py) made of tool instances that belong to nobody else.

    Args:
      instances: {instance name: object}. The world takes them over; no other world may hold them.
      tools: {tool name: instance name}; the tool is the instance's method of that name. Default: every public method
        of every instance.
      time_limit_s: wall-clock limit of one call in seconds; None for none. See limits.py for what it cannot stop. All
        calls together get TIME_BUDGET times as much; then every further call is a time_limit and runs nothing.
      max_result_chars: longer results are replaced by a short message, and so are all once they sum up to TEXT_BUDGET
        times as many.
      guards: {tool name: Guard} for tools whose arguments can ask for endless work.
      scope: entered around each call, for libraries with process-wide settings that a tool changes.
      defaults: the table that keeps this world's copies of mutable default arguments; two worlds given the same one
        share them (the official checker's way). Default: one of its own.
    """

    def __init__(
        self,
        instances: Mapping[str, object],
        tools: Mapping[str, str] | None = None,
        *,
        time_limit_s: float | None = TIME_LIMIT_S,
        max_result_chars: int = MAX_RESULT_CHARS,
        guards: Mapping[str, Guard] | None = None,
        scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
        defaults: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        self._instances = dict(instances)
        if tools is None:
            self._tools = public_tools(self._instances)
        else:
            self._tools = dict(tools)
            _check_tools(self._tools, self._instances)
        for tool in DENIED_NAMES.intersection(self._tools):
            raise ValueError(f"tool name {tool!r} is one that the executor always refuses; rename the tool")
        self._time_limit_s = time_limit_s
        self._time_left = math.inf if time_limit_s is None else TIME_BUDGET * time_limit_s
        self._chars_left = TEXT_BUDGET * max_result_chars
        self._max_result_chars = max_result_chars
        self._guards = dict(guards or {})
        self._scope = scope
        # Mutable default arguments are one object per function, i.e. shared by all worlds of the process. Each world
        # gets copies of its own, which live as long as the world: aliasing within an episode stays as it is upstream.
        self._defaults: dict[str, dict[str, Any]] = {} if defaults is None else defaults
        self._stuck = False
        self._returned: Any = None  # by the last call that ran to its end, before it became text

    def tool_names(self) -> frozenset[str]:
        return frozenset(self._tools)

    def state(self) -> dict[str, dict[str, Any]]:
        """The live public attributes (not copies) of every instance."""
        return {name: public_attributes(instance) for name, instance in self._instances.items()}

    def call(self, call: Call) -> CallResult:
        """Executes one call. Never raises for what the policy wrote; an exception in a tool is an observation."""
        if self._stuck:
            return _failed(call, "an earlier call never ended", "time_limit", "earlier call")
        if self._time_left <= 0:
            return _failed(call, "time limit exceeded by the calls before", "time_limit", "all calls")
        parts = call.name.split(".", 2)
        bare_name = parts[1] if len(parts) > 1 else call.name
        if bare_name in DENIED_NAMES:
            return _failed(call, f"Function call {bare_name} is not allowed.", "unknown_tool", "not allowed")
        if call.name not in self._tools:
            return _failed(call, f"name '{parts[0]}' is not defined", "unknown_tool", call.name)
        if any(isinstance(value, Unevaluated) for value in call.arguments.values()):
            return self._call_with_source(call)
        method = getattr(self._instances[self._tools[call.name]], call.name)
        shape = _shape(getattr(method, "__func__", method), hasattr(method, "__func__"))
        misfit = _misfit(shape, call)
        defaults = {} if misfit else self._mutable_defaults(call, shape)
        if not misfit and (guard := self._guards.get(call.name)):
            reason = guard(shape.signature.bind(*call.positional, **call.arguments).arguments)
            if reason is not None:
                return _failed(call, f"time limit exceeded: {reason}", "time_limit", reason)
        raw: Any = None

        def work() -> str:
            nonlocal raw
            # Copies, so that a tool which keeps or changes an argument does not change the recorded call.
            args = [_private(v) for v in call.positional]
            kwargs = {k: _private(v) for k, v in call.arguments.items()}
            with self._scope():
                raw = method(*args, **kwargs, **defaults)
                return result_text(raw)

        start = time.monotonic()
        try:
            text = run_limited(work, self._time_limit_s and min(self._time_limit_s, max(self._time_left, 0.01)))
        except TimeLimitExceeded:
            return _failed(call, "time limit exceeded", "time_limit", f"{self._time_limit_s:g} s")
        except CallStuck:
            self._stuck = True
            return _failed(call, "time limit exceeded", "time_limit", f"{self._time_limit_s:g} s")
        except (Exception, SystemExit, GeneratorExit) as error:
            kind, detail = misfit or _classify(error, method, shape.signature, call)
            return _failed(call, _message(error), kind, detail)
        finally:
            self._time_left -= time.monotonic() - start
        limit = min(self._max_result_chars, self._chars_left)
        if len(text) > limit:
            message = f"result of {len(text)} characters exceeds the limit of {limit}"
            return _failed(call, message, "size_limit", f"{limit} characters")
        self._chars_left -= len(text)
        self._returned = raw
        return CallResult(call, text, "tool_error" if _is_error_result(raw) else "none")

    def _call_with_source(self, call: Call) -> CallResult:
        """BFCL evaluates source in an argument: a tool called there runs first, and this one gets what it returned.

        Tools and literals are all that can be reached here; any other name is not defined.
        """
        arguments = {}
        for name, value in call.arguments.items():
            if isinstance(value, Unevaluated):
                try:
                    value = self._evaluated(ast.parse(value, "<string>", mode="eval").body)
                except _Failed as failed:
                    return _failed(call, str(failed), "argument_type", name)
                except Exception as error:  # not Python, or nested too deep
                    return _failed(call, _message(error), "argument_type", name)
            arguments[name] = value
        return replace(self.call(Call(call.name, arguments, call.positional)), call=call)

    def _evaluated(self, node: ast.expr | None) -> Any:
        match node:
            case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords):
                if name not in self._tools:
                    raise _Failed(f"name '{name}' is not defined")
                arguments = {str(k.arg): self._evaluated(k.value) for k in keywords}
                result = self.call(Call(name, arguments))
                if not result.answered:
                    raise _Failed(result.text.removeprefix(_ERROR_HEAD))
                return self._returned
            case ast.Dict(keys=keys, values=values):
                return {self._evaluated(k): self._evaluated(v) for k, v in zip(keys, values, strict=True)}
            case ast.Name(id=name):
                raise _Failed(f"name '{name}' is not defined")
            case None:
                raise _Failed("a mapping is unpacked")
            case _:
                return ast.literal_eval(node)

    def _mutable_defaults(self, call: Call, shape: _Shape) -> dict[str, Any]:
        if not shape.mutable:
            return {}
        if call.name not in self._defaults:
            self._defaults[call.name] = {name: copy.deepcopy(value) for name, value in shape.mutable.items()}
        given = shape.signature.bind(*call.positional, **call.arguments).arguments
        return {name: value for name, value in self._defaults[call.name].items() if name not in given}


def public_tools(instances: Mapping[str, object]) -> dict[str, str]:
    """{method name: instance name} of every public method; two instances must not offer the same name."""
    tools: dict[str, str] = {}
    for instance_name, instance in instances.items():
        for name in _public_methods(type(instance)):  # type: ignore[arg-type]  # mypy: a class is hashable
            if name in tools:
                raise ValueError(f"tool {name!r} is offered by both {tools[name]!r} and {instance_name!r}; rename one")
            tools[name] = instance_name
    return tools


def _check_tools(tools: Mapping[str, str], instances: Mapping[str, object]) -> None:
    for tool, instance in tools.items():
        if instance not in instances:
            raise ValueError(f"tool {tool!r} belongs to instance {instance!r}, which is not in {sorted(instances)}")
        if not callable(getattr(instances[instance], tool, None)):
            raise ValueError(f"instance {instance!r} has no method {tool!r}; fix the tool map or the class")


def result_text(value: Any) -> str:
    """BFCL's rule for turning what a tool returned into the string that is shown and compared."""
    if type(value) is str:
        return value
    if type(value) is dict:
        try:
            return json.dumps(value)
        except Exception:  # whatever json makes of the tool's objects (mpf, sets, cycles, ...)
            return str(value)
    return str(value)


@functools.lru_cache(maxsize=256)
def _public_methods(kind: type) -> tuple[str, ...]:
    return tuple(name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_"))


@dataclass(frozen=True)
class _Shape:
    """What is asked of a tool's signature at every call, worked out once."""

    signature: inspect.Signature
    names: frozenset[str]  # arguments that may be given by name
    required: frozenset[str]
    mutable: Mapping[str, Any]  # default values that a tool could change


@functools.lru_cache(maxsize=4096)
def _shape(function: Callable[..., Any], bound: bool) -> _Shape:
    signature = inspect.signature(function)
    if bound:
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    by_name = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return _Shape(
        signature,
        names=frozenset(p.name for p in by_name),
        required=frozenset(p.name for p in _required(signature)),
        mutable={p.name: p.default for p in by_name if isinstance(p.default, list | dict | set)},
    )


def _required(signature: inspect.Signature) -> list[inspect.Parameter]:
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [p for p in signature.parameters.values() if p.default is p.empty and p.kind not in kinds]


class _Failed(Exception):
    """Source in an argument that cannot be evaluated; the message is what the call's result will say."""


_ERROR_HEAD = "Error during execution: "


def _failed(call: Call, message: str, kind: ErrorKind, detail: str) -> CallResult:
    return CallResult(call, _ERROR_HEAD + message, kind, detail)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception whose __str__ breaks
        return type(error).__name__


def _private(value: Any) -> Any:
    return copy.deepcopy(value) if isinstance(value, list | dict | set | tuple) else value


def _misfit(shape: _Shape, call: Call) -> tuple[ErrorKind, str] | None:
    """Why the arguments do not fit the parameters: ("missing_argument" | "unexpected_argument", name), or None."""
    if not call.positional and shape.required <= call.arguments.keys() <= shape.names:
        return None
    signature = shape.signature
    try:
        signature.bind(*call.positional, **call.arguments)
        return None
    except TypeError:
        pass
    parameters = signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    by_position = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    unexpected = [] if takes_any else [name for name in call.arguments if name not in parameters]
    twice = [name for name in by_position[: len(call.positional)] if name in call.arguments]
    if unexpected or twice:
        return "unexpected_argument", (unexpected or twice)[0]
    given = {*by_position[: len(call.positional)], *call.arguments}
    for p in _required(signature):
        if p.name not in given:
            return "missing_argument", p.name
    return "unexpected_argument", f"position {len(by_position) + 1}"


def _classify(
    error: BaseException, method: Callable[..., Any], signature: inspect.Signature, call: Call
) -> tuple[ErrorKind, str]:
    """An exception raised inside the tool: charged to an argument of a type the method does not declare, if any."""
    mistyped = _mistyped_argument(method, signature, call)
    if mistyped and isinstance(error, TypeError | ValueError | AttributeError | KeyError):
        return "argument_type", mistyped
    if isinstance(error, TypeError):
        return "argument_type", ""
    return "exception", type(error).__name__


def _mistyped_argument(method: Callable[..., Any], signature: inspect.Signature, call: Call) -> str:
    try:
        hints = typing.get_type_hints(method)
    except Exception:  # annotations that do not resolve: nothing is known
        return ""
    for name, value in signature.bind_partial(*call.positional, **call.arguments).arguments.items():
        if name in hints and not _fits(value, hints[name]):
            return name
    return ""


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value fits an annotation, outermost level only; what is not understood fits."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    kind = origin or hint
    if not isinstance(kind, type):
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _is_error_result(value: Any) -> bool:
    """`{"error": ...}`, alone, in a list, or as a JSON string."""
    if isinstance(value, str) and '"error"' in value and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    items: Sequence[Any] = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(item, dict) and item.get("error") not in (None, False, "") for item in items)
