"""Phase timer: exclusive, adds up, goes on after a resume."""

import pytest

from seal_jax.telemetry.timing import PhaseTimer, peak_rss_mib


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_the_display_is_told_of_outer_phases():
    timer, told = PhaseTimer(Clock()), []
    timer.on_phase = told.append
    with timer.phase("rollout"), timer.phase("decode"):
        pass
    with timer.phase("update"):
        pass
    assert told == ["rollout", "update"]


def test_nested_phases_are_exclusive_and_laps_add_up():
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer.phase("rollout"):
        clock.now += 3
        with timer.phase("env"):
            clock.now += 1
        clock.now += 2
    clock.now += 4  # in no phase
    assert timer.lap() == {"rollout": 5.0, "env": 1.0}
    with timer.phase("rollout"):
        clock.now += 10
        assert timer.lap() == {"rollout": 10.0}  # an open phase is charged up to now
    assert timer.lap() == {"rollout": 0.0}
    assert timer.totals == {"rollout": 15.0, "env": 1.0}
    assert timer.wall() == 20.0
    shares = timer.shares()
    assert shares == {"rollout": 0.75, "env": 0.05, "other": pytest.approx(0.2)}


def test_a_phase_that_raises_is_closed():
    clock = Clock()
    timer = PhaseTimer(clock)
    with pytest.raises(RuntimeError), timer.phase("update"):
        clock.now += 1
        raise RuntimeError
    clock.now += 5
    assert timer.lap() == {"update": 1.0}


def test_state_goes_on_after_a_resume():
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer.phase("update"):
        clock.now += 6
    state = timer.state()
    clock.now += 1000  # the machine was away
    resumed = PhaseTimer(clock)
    resumed.load(state)
    with resumed.phase("update"):
        clock.now += 2
    assert resumed.wall() == 8.0 and resumed.totals == {"update": 8.0} and resumed.lap() == {"update": 2.0}


def test_peak_memory_is_plausible():
    assert 5 < peak_rss_mib() < 1_000_000
