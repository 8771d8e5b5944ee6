"""The settings of Ω and Evolve. Every number is used as written: a configured 0 means 0, never "the default"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from seal_jax.types import FAILURE_LABELS

COMPONENTS = ("schema", "err", "cap")
SCHEMA_PARTS = ("required", "type", "values", "format")

#: Which components (of Eq. 9) answer which failure (paper section 3.3).
COMPONENTS_OF: Mapping[str, tuple[str, ...]] = {
    "invalid_tool_call": ("cap", "err"),
    "argument_mismatch": ("schema", "err"),
    "state_mismatch": ("cap",),
    "recovery_failure": ("err",),
    "missing_tool_call": ("cap",),
    "response_mismatch": ("cap",),
    "spurious_tool_call": ("cap",),
}

_ON, _OFF = 0.08, 0.04


@dataclass(frozen=True)
class InterfaceSettings:
    """What Ω may show, and when a cue comes and goes.

    Attributes:
      components: of Eq. 9, which exist at all: "schema" (φ_schema), "err" (φ_err), "cap" (φ_cap). () = no Ω.
      placement: where φ_schema stands: "note" (its own message) or "inline" (inside the tool docs, the paper's way).
      activate: per label, the rate (share of labelled turns, moving average) at which its cue comes. Labels left out
        keep the default 0.08. Each label has its own threshold; rates are never summed.
      retire: per label, the rate below which its cue goes; at most `activate`. Default 0.04. 0 never retires.
      min_rounds: rounds that a cue is shown at least.
      min_count: turns with the label in the last round, without which a cue does not come.
      max_cues: how many cues may be active at once, pinned ones aside.
      pinned: labels whose cue is always on, whatever the profile (ablations, warm start).
      schema_parts: what φ_schema says about an argument: "required", "type", "values" (allowed ones), "format".
      max_tools: how many tools a cue lists before it says "and others".
      feedback: how finely φ_err words an error: "plain" (one text per error kind, few words: what the quickstart's
        policy was taught to read) or "classed" (also what the call violates in its docs, and the class of a refusal).
    """

    components: tuple[str, ...] = COMPONENTS
    placement: str = "note"
    activate: Mapping[str, float] = field(default_factory=dict)
    retire: Mapping[str, float] = field(default_factory=dict)
    min_rounds: int = 2
    min_count: int = 4
    max_cues: int = 3
    pinned: tuple[str, ...] = ()
    schema_parts: tuple[str, ...] = SCHEMA_PARTS
    max_tools: int = 12
    feedback: str = "plain"

    def __post_init__(self) -> None:
        for name in ("components", "pinned", "schema_parts"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise ValueError(f"interface.{name}={value!r} must be a list of names; write ({value!r},)")
            object.__setattr__(self, name, tuple(dict.fromkeys(value)))
        _known("components", self.components, COMPONENTS)
        _known("schema_parts", self.schema_parts, SCHEMA_PARTS)
        _known("pinned", self.pinned, FAILURE_LABELS)
        _known("activate", self.activate, FAILURE_LABELS)
        _known("retire", self.retire, FAILURE_LABELS)
        if self.placement not in ("note", "inline"):
            raise ValueError(f"interface.placement={self.placement!r} is not known; choose 'note' or 'inline'")
        if self.feedback not in ("plain", "classed"):
            raise ValueError(f"interface.feedback={self.feedback!r} is not known; choose 'plain' or 'classed'")
        for name, low in (("min_rounds", 0), ("min_count", 0), ("max_cues", 0), ("max_tools", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"interface.{name}={value!r} must be a whole number of at least {low}")
        on = {label: _rate("activate", label, self.activate, _ON) for label in FAILURE_LABELS}
        # A threshold set lower than the default retirement pulls that one down with it.
        off = {label: _rate("retire", label, self.retire, min(_OFF, on[label])) for label in FAILURE_LABELS}
        for label in FAILURE_LABELS:
            if off[label] > on[label]:
                raise ValueError(
                    f"interface.retire[{label!r}]={off[label]} is above interface.activate[{label!r}]={on[label]}: "
                    "the cue would come and go in the same round; lower retire"
                )
        object.__setattr__(self, "activate", on)
        object.__setattr__(self, "retire", off)
        for label in self.pinned:
            if not self.usable(label):
                raise ValueError(
                    f"interface.pinned holds {label!r}, which needs one of the components {COMPONENTS_OF[label]}, but "
                    f"interface.components={self.components}; add it or unpin the label"
                )

    def usable(self, label: str) -> bool:
        """Has this label's cue any component that is enabled?"""
        return any(c in self.components for c in COMPONENTS_OF[label])

    def to_dict(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> InterfaceSettings:
        """From a config mapping or to_dict(); an unknown key is an error."""
        names = [f.name for f in fields(InterfaceSettings)]
        unknown = sorted(set(data) - set(names))
        if unknown:
            raise ValueError(f"interface option {unknown[0]!r} is not known; choose from {names}")
        return InterfaceSettings(**data)


def _known(name: str, values: Any, allowed: tuple[str, ...]) -> None:
    for value in values:
        if value not in allowed:
            raise ValueError(f"interface.{name} holds {value!r}, which is not known; choose from {allowed}")


def _rate(name: str, label: str, given: Mapping[str, float], default: float) -> float:
    value = given[label] if label in given else default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise ValueError(f"interface.{name}[{label!r}]={value!r} is a share of turns; set it between 0.0 and 1.0")
    return float(value)
