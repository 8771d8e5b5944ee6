"""What rollouts cost: the tokens that went through the model, and the places that were computed without a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

#: Phases of `PhaseTimer` in which a rollout's seconds are spent.
PHASES = ("prefill", "extend", "decode", "environment")


@dataclass
class Work:
    """Counts of tokens (int). A place is one token's slot in a batch that the device computed, padding included.

    Every token of an episode goes through the model once: `processed` is the prompts, once per group, and all suffixes,
    without each row's last sampled token, which nothing follows.
    """

    prompt: int = 0  # prompt tokens, once per group
    fed: int = 0  # tokens fed to rows: cues, observations, templates, and what the last message left pending
    decoded: int = 0  # sampled tokens that were fed back inside the decode loop
    sampled: int = 0  # sampled tokens; the last one of a message is not among `decoded`
    steps: int = 0  # passes of the decode loop through the model
    prefill_places: int = 0
    extend_places: int = 0
    decode_places: int = 0

    def __iadd__(self, other: Work) -> Work:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self

    @property
    def processed(self) -> int:
        """Tokens that went through the model."""
        return self.prompt + self.fed + self.decoded

    @property
    def padding_share(self) -> float:
        """Share of the places of prefill and extend that held no token; NaN if there were none."""
        return _waste(self.prompt + self.fed, self.prefill_places + self.extend_places)

    @property
    def idle_share(self) -> float:
        """Share of the decode loop's places whose row had ended its message, or never was; NaN if there were none."""
        return _waste(self.decoded, self.decode_places)

    def metrics(self, seconds: Mapping[str, float], wall_s: float) -> dict[str, float]:
        """The `rollout/...` metrics (see `seal_jax.telemetry`) of rollouts that took `wall_s` seconds, of which
        `seconds` in each phase."""
        return {
            "rollout/prompt_tokens": float(self.prompt),
            "rollout/fed_tokens": float(self.fed),
            "rollout/sampled_tokens": float(self.sampled),
            "rollout/processed_tokens": float(self.processed),
            "rollout/steps": float(self.steps),
            "rollout/padding_share": self.padding_share,
            "rollout/idle_share": self.idle_share,
            "rollout/sampled_per_s": self.sampled / wall_s,
            "rollout/processed_per_s": self.processed / wall_s,
            **{f"rollout/time_share/{name}": seconds.get(name, 0.0) / wall_s for name in PHASES},
        }


def _waste(used: int, places: int) -> float:
    return 1.0 - used / places if places else float("nan")
