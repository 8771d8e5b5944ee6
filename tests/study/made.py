"""Made-up records of the study, with the fields of experiments/study/records.py and answers that are known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from configs.toolbox import ARMS
from experiments.study.records import COUNTED, CURVES, Record
from seal_jax.types import CATEGORIES

ROUNDS = 12


def record(
    arm: str = "vanilla",
    seed: int = 0,
    *,
    start: str = "never",
    size: str = "small",
    test: float = 0.3,
    validation: Sequence[tuple[int, float]] = ((4, 0.1), (8, 0.2), (12, 0.3)),
    curves: dict[str, list[float | None]] | None = None,
    cues: Sequence[Sequence[str]] = ((),) * ROUNDS,
    **fields: Any,
) -> Record:
    """One run; every category scores as the whole, ood is 10 points below test and the cued score 20 above."""
    success = {"test": test, "ood": test - 0.1, "test_cued": test + 0.2}
    return {
        "start": start,
        "arm": arm,
        "seed": seed,
        "size": size,
        "settings": "0" * 64,
        "rounds": ROUNDS,
        "reported_round": ROUNDS,
        "success": success,
        "by_category": {s: dict.fromkeys(CATEGORIES, v) for s, v in success.items()},
        "cued_bonus": 0.2,
        "after_error": 0.25,
        "n_error": 100,
        "n_test": 400,
        "validation": [list(point) for point in validation],
        "cost": {"episodes": ROUNDS * 128, "sampled_tokens": 2e5, "processed_tokens": 1e6, "seconds": 90.0},
        "curves": {name: [None] * ROUNDS for name in CURVES} | (curves or {}),
        "cues": [list(on) for on in cues],
        **fields,
    }


def study(seeds: int = 4, starts: Sequence[str] = ("never", "sometimes")) -> list[Record]:
    """Every arm, like a study in shape and noise; three of them in the large size too."""
    records = []
    for start in starts:
        for arm in ARMS:
            for size in ("small", "large") if arm in ("vanilla", "full", "half") else ("small",):
                records += [_lifelike(start, arm, seed, size) for seed in range(seeds)]
    return records


def _lifelike(start: str, arm: str, seed: int, size: str) -> Record:
    arm_draw, draw = random.Random(f"{start}/{arm}"), random.Random(f"{start}/{arm}/{seed}/{size}")
    reach = 0.35 + 0.1 * (start == "sometimes") + arm_draw.gauss(0, 0.08) * (arm != "vanilla")
    test = min(0.95, max(0.1, reach + draw.gauss(0, 0.02)))
    exposure = ARMS[arm].settings.get("interface.exposure", 0.0)

    def towards(first: float, last: float, noise: float = 0.03) -> list[float | None]:
        steps = [first + (last - first) * i / (ROUNDS - 1) for i in range(ROUNDS)]
        return [min(1.0, max(0.0, x + draw.gauss(0, noise))) for x in steps]

    curves: dict[str, list[float | None]] = {"groups/all_fail": towards(0.6, 0.5 - 0.5 * reach)}
    curves["groups/informative"] = towards(0.35, 0.4)
    curves["weight/gain"] = towards(1.0, 1.4)
    shares = {label: arm_draw.random() for label in COUNTED}
    for label, share in shares.items():
        curves[f"profile/{label}"] = towards(share / sum(shares.values()), 1 / len(shares), 0.0)
        curves[f"advantage_mass/{label}"] = towards(share / sum(shares.values()), 1 / len(shares), 0.0)
    for rows, there in (("bare", exposure < 1), ("cued", exposure > 0)):
        met = [float(draw.randint(20, 60)) if there else 0.0 for _ in range(ROUNDS)]
        rates = towards(0.0 if rows == "bare" else 0.5, 0.6)
        curves[f"refused/{rows}"] = list(met)
        curves[f"refused/{rows}/repaired"] = [float(int(n * (p or 0.0))) for n, p in zip(met, rates, strict=True)]
    on = [("recovery_failure", *(["spurious_tool_call"] if draw.random() < 0.4 else [])) for _ in range(ROUNDS)]
    until = draw.randint(5, ROUNDS)
    cues = [on[i] if exposure > 0 and i < until else () for i in range(ROUNDS)]
    validation = [(r, min(1.0, max(0.0, test * r / ROUNDS + draw.gauss(0, 0.02)))) for r in (4, 8, 12)]
    return record(arm, seed, start=start, size=size, test=test, validation=validation, curves=curves, cues=cues)
