"""Libraries' INFO lines are dropped, ours and all warnings stay."""

import logging
from pathlib import Path

import seal_jax
from seal_jax.telemetry.logs import _OursOrWarning, quiet_libraries


def record(path, level):
    return logging.LogRecord("absl", level, str(path), 1, "x", (), None)


def test_only_our_info_lines_pass():
    from absl import logging as absl_logging

    ours = Path(seal_jax.__file__).resolve().parent / "run.py"
    keep = _OursOrWarning().filter
    assert keep(record(ours, logging.INFO)) and keep(record("/x/orbax/manager.py", logging.WARNING))
    assert not keep(record("/x/orbax/manager.py", logging.INFO))
    quiet_libraries()
    quiet_libraries()
    handler = absl_logging.get_absl_handler()
    assert sum(isinstance(f, _OursOrWarning) for f in handler.filters) == 1
