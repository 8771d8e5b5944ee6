"""Small files, read and written whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from etils import epath


def write_whole(path: Path | epath.Path, content: str | bytes) -> None:
    """Writes a file (text as UTF-8) whole or not at all: a process that dies on the way leaves the old one."""
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_bytes(content.encode() if isinstance(content, str) else content)
    scratch.replace(path)


def read_object(path: Path | epath.Path, mend: str) -> dict[str, Any]:
    """The JSON object in a file; ValueError in one line that names the file and the mend if there is none."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{path} is damaged ({error}); {mend}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged (not a JSON object); {mend}")
    return value
