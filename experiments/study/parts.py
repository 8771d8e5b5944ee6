"""What each part of the method does: pairs of arms that differ in that part alone."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """What `with_it` has and `without` has not, else alike."""

    what: str
    with_it: str
    without: str


PARTS = (
    # the environment side
    Part("cues on every row", "no_reweighting", "vanilla"),
    Part("cues on every row, beside reweighting", "full", "no_environment"),
    Part("cues on half of each group, not on all", "half", "full"),
    Part("cues that fade out", "anneal", "full"),
    Part("cues trained away (`strip_in_update`)", "half_strip", "half"),
    Part("cues that fade out, trained away", "half_strip_anneal", "half_strip"),
    Part("φ_schema alone, on half", "schema_only", "no_environment"),
    Part("φ_err alone, on half", "err_only", "no_environment"),
    Part("φ_cap alone, on half", "cap_only", "no_environment"),
    Part("φ_schema alone, on half, trained away", "half_strip_schema", "no_environment"),
    Part("φ_err alone, on half, trained away", "half_strip_err", "no_environment"),
    Part("φ_cap alone, on half, trained away", "half_strip_cap", "no_environment"),
    # the closed loop
    Part("the loop closed, cues on every row", "full", "no_closed_loop"),
    Part("the loop closed, cues on half, trained away", "half_strip", "half_strip_frozen"),
    # the reweighting
    Part("static weights, no cues", "no_environment", "vanilla"),
    Part("static weights, cues on every row", "full", "no_reweighting"),
    Part("static weights, cues on half, trained away", "half_strip", "half_strip_plain"),
    Part("weights by what was diagnosed, not at random", "no_environment", "random"),
    Part("weights rescaled to leave the sum of |advantages|", "normalized", "no_environment"),
    Part("weights by the sign of the advantage", "sign_aware", "no_environment"),
    Part("weights on each turn's own tokens", "turn", "no_environment"),
    # other ways
    Part("all that the released code does", "release", "vanilla"),
    Part("progress as reward", "progress", "vanilla"),
)
