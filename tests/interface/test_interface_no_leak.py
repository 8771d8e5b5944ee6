"""Nothing of a reference program can reach Ω: by construction of what it is handed, and on worlds full of secrets."""

import dataclasses
import inspect
import random
import typing
from collections.abc import Mapping, Sequence

import pytest

import seal_jax.interface.arguments as arguments_module
import seal_jax.interface.cues as cues
import seal_jax.interface.errors as errors_module
import seal_jax.interface.evolve as evolve_module
import seal_jax.interface.interface as interface_module
import seal_jax.types as types
from seal_jax.diagnosis.profile import Counts, Profile
from seal_jax.interface import Interface, InterfaceSettings, evolve, full
from seal_jax.types import Call, CallResult, ParseError

#: Everything that is, holds, or leads to a reference program or what was seen of one.
FORBIDDEN = {
    types.Task,
    types.Trajectory,
    types.Step,
    types.TurnEvidence,
    types.AttributeDiff,
    types.Verdict,
    types.TurnLabel,
    types.Diagnosis,
}
ALLOWED = {Interface, InterfaceSettings, Profile, Counts, CallResult, Call, ParseError}


def parts(annotation):
    """An annotation and everything it is made of."""
    yield annotation
    for arg in typing.get_args(annotation):
        yield from parts(arg)


def reachable(annotations):
    """All annotations that can be reached through the fields of dataclasses, and which dataclasses those were."""
    seen, classes, todo = [], set(), list(annotations)
    while todo:
        for part in parts(todo.pop()):
            seen.append(part)
            if dataclasses.is_dataclass(part) and part not in classes:
                classes.add(part)
                todo += typing.get_type_hints(part).values()
    return seen, classes


def inputs_of_omega():
    methods = [m for n, m in inspect.getmembers(Interface, inspect.isfunction) if not n.startswith("__")]
    for function in [*methods, evolve, full, interface_module.initial]:
        hints = typing.get_type_hints(function)
        for name in inspect.signature(function).parameters:
            if name == "self":
                yield Interface
            else:
                assert name in hints, f"{function.__qualname__}: {name} has no annotation, so nothing is proven of it"
                yield hints[name]


def test_no_input_of_omega_can_hold_a_reference_program():
    seen, classes = reachable(inputs_of_omega())
    assert classes == ALLOWED  # a new input type must be looked at, then added here
    assert not classes & FORBIDDEN
    assert types.Program not in seen
    # A call is only ever the one call that the policy made, as the field of its own result; never a collection of them.
    for part in seen:
        if typing.get_origin(part) in (tuple, list, Sequence, Mapping, set, frozenset):
            assert not any(p is Call for p in parts(part)), part
    holders = {c for c in classes if Call in typing.get_type_hints(c).values()}
    assert holders == {CallResult}


def test_the_profile_holds_numbers_only():
    _, classes = reachable([Profile])
    leaves = {p for c in classes for h in typing.get_type_hints(c).values() for p in parts(h) if isinstance(p, type)}
    assert {x for x in leaves if typing.get_origin(x) is None} <= {int, float, str, Counts}
    # The one string says which rows were counted.
    assert [n for n, h in typing.get_type_hints(Profile).items() if h is str] == ["rows"]


def test_the_modules_import_none_of_the_forbidden_types():
    for module in (arguments_module, cues, errors_module, evolve_module, interface_module):
        held = {x for x in vars(module).values() if isinstance(x, type)}
        assert not held & FORBIDDEN, module.__name__


def secrets(rng, n):
    return [rng.choice([f"zq{rng.randint(10**6, 10**7)}", rng.randint(10**6, 10**7), rng.random()]) for _ in range(n)]


@pytest.mark.parametrize("feedback", ["plain", "classed"])
def test_no_value_of_a_call_or_a_result_is_repeated(feedback):
    rng, shown = random.Random(0), full(InterfaceSettings(feedback=feedback))
    prop = {"type": "string", "description": "what to take"}
    for _ in range(200):
        names = [f"tool{i}" for i in range(4)]
        tools = [
            {"name": n, "description": "does it", "parameters": {"properties": {"thing": prop}, "required": ["thing"]}}
            for n in names
        ]
        values = secrets(rng, 3)
        kind = rng.choice(sorted(set(cues.FEEDBACK) - {"parse"}))
        error = CallResult(
            Call(rng.choice(names), {"thing": values[0], "other": values[1]}),
            f'{{"error": "{values[2]} refuses {values[0]}"}}',
            kind,
            rng.choice(["thing", "", f"position {values[0]}", f"{values[0]} is wrong"]),
        )
        text = shown.feedback(error, tools)
        assert text
        assert not any(str(v) in text for v in values), text
        for kind in ("bad_json", "python_literal", "unknown_tool", "unavailable_tool"):
            parse = ParseError(kind, f"unexpected '{values[0]}'", 3)
            assert not any(str(v) in shown.feedback(parse, tools) for v in values)
