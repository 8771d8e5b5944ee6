"""Ω_{t+1} = Evolve(Ω_t, C_t) (paper Algorithm 1): cues follow the failures that are frequent now.

A pure function of its arguments, so hosts that hold the same (summed) profile hold the same Ω.
"""

from __future__ import annotations

from dataclasses import replace

from seal_jax.diagnosis.profile import Profile
from seal_jax.interface.interface import Interface
from seal_jax.types import FAILURE_LABELS, LABEL_ID


def evolve(interface: Interface, profile: Profile) -> Interface:
    """Brings, keeps and retires cues, each label by its own rate and thresholds.

    A cue comes when its rate has risen to `activate` and the label was seen at least `min_count` times in the last
    round; it goes when its rate has fallen below `retire`, after `min_rounds` rounds at the earliest. Of the candidates
    at most `max_cues` are shown: those within their first `min_rounds` rounds before the others, then by rate, equal
    rates in the order of LABELS. Pinned cues are always shown and not counted. A round in which no turn was labelled
    changes nothing.
    """
    s = interface.settings
    ages = dict(zip(interface.active, interface.ages, strict=True))
    if profile.latest.turns == 0:
        older = tuple(age + 1 for age in interface.ages)
        return replace(interface, round=interface.round + 1, ages=older, retired=())

    rates = {label: profile.rates[label] for label in FAILURE_LABELS}
    counts = profile.counts

    def young(label: str) -> bool:
        return label in ages and ages[label] + 1 < s.min_rounds  # +1: the round that has just ended

    def wanted(label: str) -> bool:
        if label in s.pinned or not s.usable(label):
            return False
        if label in ages:
            return young(label) or rates[label] >= s.retire[label]
        return rates[label] >= s.activate[label] and counts[LABEL_ID[label]] >= s.min_count

    # sorted() is stable and FAILURE_LABELS is in the order of LABELS, which settles ties.
    ranked = sorted(filter(wanted, FAILURE_LABELS), key=lambda label: (not young(label), -rates[label]))
    active = s.pinned + tuple(ranked[: s.max_cues])
    return replace(
        interface,
        active=active,
        round=interface.round + 1,
        ages=tuple(ages[label] + 1 if label in ages else 0 for label in active),
        rates=rates,
        retired=tuple(label for label in interface.active if label not in active),
    )
