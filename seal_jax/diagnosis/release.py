"""The tags that the authors' released code computes, from clean evidence (for `reweight="release"`).

The release walks the reference program turn by turn and knows no priorities: spurious or correct abstention on an
abstain turn; no executed call, differing state, or an absent result on the others. State differences are cumulative:
once the worlds have diverged, every later turn is `state_mismatch`. Unlike the release, whose diagnosis ran on
instances that the reward check had already changed, this reads the verifier's fresh worlds.
"""

from __future__ import annotations

from collections.abc import Mapping

from seal_jax.types import TurnEvidence, Verdict

#: The release's tags. `checker_error` and `gt_error` never enter a weight. Its `instance_mismatch` cannot occur: policy
#: and reference always hold the same instances.
RELEASE_TAGS: tuple[str, ...] = (
    "pass",
    "correct_abstention",
    "spurious_tool_call",
    "empty_turn_model_response",
    "state_mismatch",
    "response_mismatch",
    "checker_error",
    "gt_error",
)
#: Where each tag stands among this package's labels, so that a batch can carry the tags as label ids.
TAG_TO_LABEL: Mapping[str, str] = {
    "pass": "pass",
    "correct_abstention": "correct_abstention",
    "spurious_tool_call": "spurious_tool_call",
    "empty_turn_model_response": "missing_tool_call",
    "state_mismatch": "state_mismatch",
    "response_mismatch": "response_mismatch",
    "checker_error": "env_error",
    "gt_error": "env_error",
}


def release_labels(verdict: Verdict) -> tuple[str, ...]:
    """One release tag per turn.

    The release pads an episode that ended early with empty turns, so a turn that was never opened is tagged
    `correct_abstention` or `empty_turn_model_response`.
    """
    return tuple(_tag(turn) for turn in verdict.turns)


def _tag(turn: TurnEvidence) -> str:
    results = [r for step in turn.steps for r in step.results]
    if not all(r.answered for r in turn.reference_results):
        return "gt_error"
    if any(r.error == "env_error" for r in results):
        return "checker_error"
    # Rejected messages are invisible to the release: it tags executed calls only.
    called = turn.reached and any(step.calls and step.error is None for step in turn.steps)
    if turn.abstain:
        return "spurious_tool_call" if called else "correct_abstention"
    if not called:
        return "empty_turn_model_response"
    if turn.state_diffs:
        return "state_mismatch"
    return "response_mismatch" if turn.missing_results else "pass"
