"""Fresh worlds of BFCL's tool classes, cut loose from everything the package shares between instances.

Upstream, mutable default arguments (`post_tweet`) and module-level payloads of the long-context category (credit cards,
booking records) are shared by the model, the reference and all later tasks of a process. Here every world has its own.
Consequence: where a model changes such a shared object and the reference does not, the official checker sees the
reference change too, and ours a state mismatch; no reference program does so. quirks.py has the official way.
"""

from __future__ import annotations

import copy
import decimal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from seal_jax.envs.bfcl.package import tool_class
from seal_jax.envs.bfcl.quirks import QuirkyWorld, instance_names
from seal_jax.envs.execution import Guard, InstanceWorld
from seal_jax.envs.snapshot import public_attributes, snapshot

_STATELESS = frozenset({"MathAPI"})

# Sizes above which MathAPI would sit in C code, where no time limit reaches, for more than about half a second
# (measured on one core). Below them its own answers come out, among them Python's refusal to print very long integers.
_MAX_POWER_BITS = 4_000_000
_MAX_DIGITS = {"square_root": 80_000, "logarithm": 15_000}
_MAX_ROUND_DIGITS = 1_000_000


def open_world(
    scenarios: Mapping[str, Any], long_context: bool, time_limit_s: float | None, max_result_chars: int
) -> InstanceWorld:
    """A world of the classes in `scenarios`, in their order and initial state."""
    instances = _package_instances(scenarios, long_context)
    for name in _sharing(scenarios, long_context):
        _detach(instances[name])
    return _world(instances, long_context, time_limit_s, max_result_chars)


def open_quirky_pair(
    model: str,
    task_id: str,
    scenarios: Mapping[str, Any],
    long_context: bool,
    time_limit_s: float | None,
    max_result_chars: int,
) -> tuple[QuirkyWorld, QuirkyWorld]:
    """Worlds of policy and reference with the official executor's quirks (see quirks.py): they share what the package
    lets them share, and with nobody else. `model` is the evaluated model's name, as the package is told it."""
    policy, reference = _package_instances(scenarios, long_context), _package_instances(scenarios, long_context)
    for name in _sharing(scenarios, long_context):
        # One copy of both, so that an object which both hold is copied once and they go on sharing it.
        policy[name], reference[name] = copy.deepcopy((policy[name], reference[name]))
    defaults: dict[str, dict[str, Any]] = {}

    def world(instances: Mapping[str, object], prefix: str) -> QuirkyWorld:
        plain = _world(instances, long_context, time_limit_s, max_result_chars, defaults)
        return QuirkyWorld(plain, instance_names(prefix, task_id, instances))

    return world(policy, f"{model}_eval"), world(reference, f"{model}_ground_truth_eval")


def _sharing(scenarios: Mapping[str, Any], long_context: bool) -> tuple[str, ...]:
    """The classes whose instances, as the package makes them, hold module-level dicts."""
    return ("TravelAPI",) if long_context and "TravelAPI" in scenarios else ()


def _detach(instance: object) -> None:
    # All of it is plain JSON data, for which a snapshot is a deep copy at a fifth of the cost.
    for name, value in public_attributes(instance).items():
        setattr(instance, name, snapshot(value))


def _package_instances(scenarios: Mapping[str, Any], long_context: bool) -> dict[str, object]:
    instances: dict[str, object] = {}
    for name, scenario in scenarios.items():
        instance: Any = tool_class(name)()
        if name not in _STATELESS:
            instance._load_scenario(snapshot(scenario), long_context=long_context)
        instances[name] = instance
    return instances


def _world(
    instances: Mapping[str, object],
    long_context: bool,
    time_limit_s: float | None,
    max_result_chars: int,
    defaults: dict[str, dict[str, Any]] | None = None,
) -> InstanceWorld:
    # `logarithm` sets mpmath's precision for the process; the long weather report is one module-level dict.
    shares = "MathAPI" in instances or (long_context and "VehicleControlAPI" in instances)
    scope: Callable[[], AbstractContextManager[Any]] = _process_wide_settings if shares else nullcontext
    return InstanceWorld(
        instances,
        time_limit_s=time_limit_s,
        max_result_chars=max_result_chars,
        guards=MATH_GUARDS,
        scope=scope,
        defaults=defaults,
    )


_lock = threading.RLock()


@contextmanager
def _process_wide_settings() -> Iterator[None]:
    """One call at a time, and the precisions of decimal and mpmath as they were before it."""
    with _lock, decimal.localcontext():
        mpmath = sys.modules.get("mpmath")
        before = mpmath.mp.prec if mpmath else 0
        try:
            yield
        finally:
            if mpmath:
                mpmath.mp.prec = before


def _guard_power(arguments: Mapping[str, Any]) -> str | None:
    base, exponent = arguments.get("base"), arguments.get("exponent")
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0 and abs(base) > 1:
        if base.bit_length() * exponent > _MAX_POWER_BITS:
            return "the power has more than a million digits"
    return None


def _guard_round(arguments: Mapping[str, Any]) -> str | None:
    digits = arguments.get("decimal_places", 0)
    if isinstance(arguments.get("number"), int) and isinstance(digits, int) and digits < -_MAX_ROUND_DIGITS:
        return f"decimal_places below -{_MAX_ROUND_DIGITS}"
    return None


def _guard_precision(tool: str) -> Guard:
    def guard(arguments: Mapping[str, Any]) -> str | None:
        precision = arguments.get("precision")
        if isinstance(precision, int | float) and precision > _MAX_DIGITS[tool]:
            return f"precision above {_MAX_DIGITS[tool]}"
        return None

    return guard


MATH_GUARDS: Mapping[str, Guard] = {
    "power": _guard_power,
    "round_number": _guard_round,
    "square_root": _guard_precision("square_root"),
    "logarithm": _guard_precision("logarithm"),
}
