"""The log on screen: our own lines and everybody's warnings, without the libraries' chatter."""

from __future__ import annotations

import logging
import os
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parents[1])


class _OursOrWarning(logging.Filter):
    """Orbax logs some ten INFO lines per checkpoint through absl's logger, which is also ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or record.pathname.startswith(_PACKAGE)


def quiet_libraries() -> None:
    """Drops INFO lines of other packages from absl's handler, and the hint of transformers that PyTorch is absent: that
    is as it should be. Call it once, at the start of main."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from absl import logging as absl_logging

    handler = absl_logging.get_absl_handler()
    if not any(isinstance(f, _OursOrWarning) for f in handler.filters):
        handler.addFilter(_OursOrWarning())
