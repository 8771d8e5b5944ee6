"""What a suite of tasks must offer, and the registry that `config.suite` is looked up in.

A suite owns its tasks, their reference programs and the making of fresh worlds. It knows no model and no tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from seal_jax.types import Call, CallResult, Program, Task


class World(Protocol):
    """One live set of tool instances. Two worlds never share mutable state (not even class or module defaults)."""

    def call(self, call: Call) -> CallResult:
        """Executes one call on the instances; never raises for anything the policy wrote."""
        ...

    def state(self) -> Mapping[str, Mapping[str, Any]]:
        """Every public attribute of every instance: {instance name: {attribute: value}}; values compare with ==."""
        ...

    def tool_names(self) -> frozenset[str]:
        """Every tool that exists in this world, revealed or not."""
        ...


class Suite(Protocol):
    """A family of tasks with executable tools and reference programs."""

    name: str
    #: An abstain turn with any executed call fails (toolbox). BFCL's official checker does not look there.
    checks_abstention: bool

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split ("train", "val", "test", "ood", ...); ValueError naming the splits for any other."""
        ...

    def reference(self, task: Task) -> tuple[Program, ...]:
        """One reference program per turn of the task."""
        ...

    def open(self, task: Task) -> World:
        """A fresh world in the task's initial state."""
        ...


def open_pair(suite: Suite, task: Task) -> tuple[World, World]:
    """The worlds of policy and reference for one verification: two of `open`, unless the suite has a way of its own."""
    own = getattr(suite, "open_pair", None)
    return (suite.open(task), suite.open(task)) if own is None else own(task)


_SUITES: dict[str, Callable[..., Suite]] = {}


def register_suite(name: str) -> Callable[[Callable[..., Suite]], Callable[..., Suite]]:
    def add(factory: Callable[..., Suite]) -> Callable[..., Suite]:
        _SUITES[name] = factory
        return factory

    return add


def make_suite(name: str, **options: Any) -> Suite:
    """Builds a registered suite; `options` come from `config.suite_options`."""
    # Imported here so that a suite's dependencies (bfcl-eval) are only needed by who asks for it.
    if name == "toolbox":
        import seal_jax.envs.toolbox  # noqa: F401
    elif name == "bfcl":
        import seal_jax.envs.bfcl  # noqa: F401
    if name not in _SUITES:
        raise ValueError(f"config.suite={name!r} is not known; choose one of {sorted({'toolbox', 'bfcl', *_SUITES})}")
    factory = _SUITES[name]
    parameters = inspect.signature(factory).parameters
    unknown = sorted(set(options) - set(parameters))
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ValueError(
            f"config.suite_options holds {unknown}, unknown to suite {name!r}; choose from {sorted(parameters)}"
        )
    return factory(**options)
