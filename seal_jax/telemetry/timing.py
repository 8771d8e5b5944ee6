"""Where the time goes: phases of a round in seconds and shares, and the peak memory of the process."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class PhaseTimer:
    """Exclusive seconds per phase: a phase that opens inside another one stops the outer clock, so the phases add up.

        with timer.phase("rollout"):
            ...
            with timer.phase("env"):      # not counted as rollout
                ...
        timer.lap()                       # {"rollout": 3.1, "env": 0.4} since the last lap

    One thread only; work timed elsewhere is given by `add`. jax returns before the device is done: block on the
    result inside the phase (`jax.block_until_ready`), or its time shows up in whatever waits for it next.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lap: dict[str, float] = {}
        self.totals: dict[str, float] = {}
        self._open: list[str] = []
        self._since = clock()
        self._started = clock()
        self._before = 0.0  # wall seconds of the runs that this one resumes
        self.on_phase: Callable[[str], None] = lambda name: None  # told of each phase that opens inside no other

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        if not self._open:
            self.on_phase(name)
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def add(self, name: str, seconds: float) -> None:
        """Counts seconds that were measured elsewhere (and are not inside an open phase)."""
        self._lap[name] = self._lap.get(name, 0.0) + seconds
        self.totals[name] = self.totals.get(name, 0.0) + seconds

    def lap(self) -> dict[str, float]:
        """Seconds per phase since the last lap (or the start)."""
        self._charge()
        lap, self._lap = self._lap, {}
        return lap

    def shares(self) -> dict[str, float]:
        """Share of each phase in the wall time so far; "other" is what no phase covered. Sums to 1."""
        self._charge()
        wall = self.wall()
        if wall <= 0:
            return {}
        shares = {name: seconds / wall for name, seconds in self.totals.items()}
        return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}

    def wall(self) -> float:
        """Wall seconds of the run, the parts before a resume included."""
        return self._before + self._clock() - self._started

    def state(self) -> dict[str, float | dict[str, float]]:
        """JSON-able, for the checkpoint (the run's "chrono")."""
        self._charge()
        return {"wall": self.wall(), "totals": dict(self.totals)}

    def load(self, state: Mapping[str, float | Mapping[str, float]]) -> None:
        """Goes on from a saved state."""
        wall, totals = state["wall"], state["totals"]
        assert isinstance(wall, (int, float)) and isinstance(totals, Mapping)
        self._before, self._started, self._since = float(wall), self._clock(), self._clock()
        self.totals = {name: float(seconds) for name, seconds in totals.items()}
        self._lap = {}

    def _charge(self) -> None:
        now = self._clock()
        if self._open:
            self.add(self._open[-1], now - self._since)
        self._since = now


def peak_rss_mib() -> float:
    """Peak resident memory of this process in MiB (host memory; a GPU's or TPU's is not in it)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes on macOS, KiB on Linux
