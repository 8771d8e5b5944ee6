"""Ω = observation ⊕ φ_schema ⊕ φ_err ⊕ φ_cap (paper Eq. 9): which cues are active, and the text they add.

Ω sees tool docs, the errors of what the policy itself did, and the profile's numbers. No type that it is handed has a
place for a reference program, a verdict or a task, so it cannot leak one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seal_jax.interface import cues
from seal_jax.interface.errors import ERROR_CLASSES
from seal_jax.interface.settings import COMPONENTS_OF, InterfaceSettings
from seal_jax.types import FAILURE_LABELS, CallResult, ParseError, ToolDoc


@dataclass(frozen=True)
class Interface:
    """One state of Ω.

    Attributes:
      active: the failure labels whose cues are shown, most frequent first (pinned ones lead).
      settings: thresholds, components, placement.
      round: how often Evolve was applied to get here.
      ages: rounds that each active cue has been shown before this one; parallel to `active`.
      rates: the rates that Evolve saw, by label; empty before the first round. For the log.
      retired: labels whose cue went in the last Evolve. For the log.
    """

    active: tuple[str, ...] = ()
    settings: InterfaceSettings = field(default_factory=InterfaceSettings)
    round: int = 0
    ages: tuple[int, ...] = ()
    rates: Mapping[str, float] = field(default_factory=dict)
    retired: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for label in self.active:
            if label not in FAILURE_LABELS:
                raise ValueError(f"Interface.active holds {label!r}, which is no failure label; use {FAILURE_LABELS}")
        if not self.ages:
            object.__setattr__(self, "ages", (0,) * len(self.active))
        if len(self.ages) != len(self.active):
            raise ValueError(f"Interface: {len(self.active)} active cues but {len(self.ages)} ages; give one for each")

    def note(self, tools: Sequence[ToolDoc], *, revealed: bool = False) -> str:
        """φ_schema (unless it stands inline) and φ_cap for the given tools, as lines; "" when there is nothing to say.

        Args:
          tools: the tools offered at the start, or on a reveal turn the revealed ones only.
          revealed: leave out the guidelines that name no tool, since the row has read them already.
        """
        s = self.settings
        lines: list[str] = []
        if self._shows("argument_mismatch", "schema") and s.placement == "note":
            lines += cues.schema_lines(tools, s.schema_parts, s.max_tools)
        for label in self.active:
            if self._shows(label, "cap") and not (revealed and "{tools}" not in cues.GUIDELINES[label]):
                lines.append(cues.guideline_text(label, tools, s.max_tools))
        return "\n".join(lines)

    def inline(self, tools: Sequence[ToolDoc]) -> tuple[ToolDoc, ...]:
        """The docs with φ_schema written into them (placement "inline"); otherwise the very same docs."""
        if self.settings.placement == "inline" and self._shows("argument_mismatch", "schema"):
            return tuple(cues.annotate(doc, self.settings.schema_parts) for doc in tools)
        return tuple(tools)

    def feedback(self, error: CallResult | ParseError, tools: Sequence[ToolDoc]) -> str:
        """φ_err for one error of the policy; "" when nothing failed or the failure's cue is not active.

        Args:
          tools: the tools offered at this moment, revealed ones included.
        """
        label = cues.LABEL_OF_ERROR.get(cues.error_kind(error))
        if label is None or not self._shows(label, "err"):
            return ""
        return cues.feedback_text(error, tools, self.settings.max_tools, self.settings.feedback == "classed")

    def _shows(self, label: str, component: str) -> bool:
        return label in self.active and component in self.settings.components and component in COMPONENTS_OF[label]

    def describe(self) -> dict[str, Any]:
        """A JSON object for the run's log: which cues are on, since when, why, and their constant texts."""
        s = self.settings
        return {
            "round": self.round,
            "placement": s.placement,
            "active": [
                {
                    "label": label,
                    "components": [c for c in COMPONENTS_OF[label] if c in s.components],
                    "rounds_shown": age,
                    "rate": self.rates.get(label),
                    "activate": s.activate[label],
                    "retire": s.retire[label],
                    "reason": self._reason(label, age),
                    "texts": self._texts(label),
                }
                for label, age in zip(self.active, self.ages, strict=True)
            ],
            "retired": list(self.retired),
            "rates": dict(self.rates),
        }

    def _reason(self, label: str, age: int) -> str:
        s, rate = self.settings, self.rates.get(label)
        if label in s.pinned:
            return "pinned"
        if rate is None:
            return "given"
        if rate >= s.activate[label]:
            return f"rate {rate:.3f} >= {s.activate[label]:g}"
        if rate >= s.retire[label]:
            return f"rate {rate:.3f} not below {s.retire[label]:g}"
        return f"rate {rate:.3f} below {s.retire[label]:g}, but shown for only {age} of {s.min_rounds} rounds"

    def _texts(self, label: str) -> list[str]:
        texts = [cues.GUIDELINES[label]] if self._shows(label, "cap") else []
        if self._shows(label, "err"):
            tables = [cues.FEEDBACK, cues.CLASSED_FEEDBACK] if self.settings.feedback == "classed" else [cues.FEEDBACK]
            texts += [text for table in tables for kind, text in table.items() if cues.LABEL_OF_ERROR[kind] == label]
            if self.settings.feedback == "classed" and label == cues.LABEL_OF_ERROR["tool_error"]:
                texts += [c.text for c in ERROR_CLASSES]
        return texts

    def to_dict(self) -> dict[str, Any]:
        """Everything that a resume needs, as a JSON object."""
        return {
            "active": list(self.active),
            "settings": self.settings.to_dict(),
            "round": self.round,
            "ages": list(self.ages),
            "rates": dict(self.rates),
            "retired": list(self.retired),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Interface:
        try:
            return Interface(
                active=tuple(data["active"]),
                settings=InterfaceSettings.from_dict(data["settings"]),
                round=int(data["round"]),
                ages=tuple(data["ages"]),
                rates=dict(data["rates"]),
                retired=tuple(data["retired"]),
            )
        except KeyError as error:
            raise ValueError(f"interface: key {error} is missing; start from initial()") from None


#: No component at all: what evaluation uses. Evolve leaves it as it is.
BARE = Interface(settings=InterfaceSettings(components=()))


def full(settings: InterfaceSettings) -> Interface:
    """Ω with every cue that its components allow: for demonstrations, and for the words a tokenizer must know."""
    return Interface(active=tuple(label for label in FAILURE_LABELS if settings.usable(label)), settings=settings)


def initial(settings: InterfaceSettings) -> Interface:
    """Ω_0: bare but for the pinned cues."""
    return Interface(active=settings.pinned, settings=settings)
