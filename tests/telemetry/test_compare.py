"""Paired comparison against numbers worked by hand."""

import math

import pytest

from seal_jax.telemetry.compare import compare


def test_paired_difference_and_standard_error():
    before = {"a": ("base", 0.0), "b": ("base", 0.0), "c": ("miss_func", 1.0), "d": ("miss_func", 0.0)}
    after = {"a": ("base", 1.0), "b": ("base", 1.0), "c": ("miss_func", 0.0), "d": ("miss_func", 0.0)}
    everything, base, miss = compare(before, after)
    # differences 1, 1, -1, 0: mean 1/4, sample variance 11/12, standard error sqrt(11/12/4)
    assert (everything.category, everything.n, everything.before, everything.after) == ("all", 4, 0.25, 0.5)
    assert everything.difference == 0.25
    assert everything.stderr == pytest.approx(math.sqrt(11 / 48))
    assert (base.category, base.difference, base.stderr) == ("base", 1.0, 0.0)
    assert (miss.category, miss.difference) == ("miss_func", -0.5)


def test_one_category_has_one_line_and_one_task_has_no_spread():
    (line,) = compare({"a": ("base", 0.0)}, {"a": ("base", 1.0)})
    assert line.category == "all" and math.isnan(line.stderr)


def test_other_tasks_are_refused():
    with pytest.raises(ValueError, match="different tasks .1 in only one of them, e.g. 'b'"):
        compare({"a": ("base", 0.0)}, {"a": ("base", 0.0), "b": ("base", 0.0)})
    with pytest.raises(ValueError, match="hold no task"):
        compare({}, {})
