"""The header of a GGUF file: its metadata and the table of its tensors, without touching tensor data.

Written from the format's description (github.com/ggml-org/ggml, docs/gguf.md; versions 2 and 3). Reading a header this
way takes a fraction of a second also for a vocabulary of 150,000 entries, and an unknown tensor type is reported with
the tensor's name. Pure Python: the tokenizer needs it on machines without jax or numpy.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """One row of the tensor table. `shape` is in row-major order (the file writes it reversed)."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int  # bytes from the start of the file


@dataclass(frozen=True)
class GGUFHeader:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        return str(self.require("general.architecture"))

    def require(self, key: str) -> Any:
        if key not in self.metadata:
            raise ValueError(f"{self.path.name}: metadata has no {key!r}; convert it again with a current llama.cpp")
        return self.metadata[key]


def read_gguf_header(path: str | Path) -> GGUFHeader:
    """Read metadata and tensor table.

    Raises:
      ValueError: no such file, not a GGUF file, a version or byte order that is not supported, or a cut-off header.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"no GGUF file {path}; give the path of a .gguf file")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path.name}: not a GGUF file (its first four bytes are not 'GGUF')")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Cursor(data, path).header()
            except struct.error as error:
                raise ValueError(f"{path.name}: the header is cut off ({error}); download the file again") from error


class _Cursor:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 4

    def header(self) -> GGUFHeader:
        version = self.scalar("I")
        if version not in (2, 3):
            known = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise ValueError(f"{self.path.name}: GGUF {known} is not supported; convert it to little-endian version 3")
        n_tensors, n_entries = self.scalar("Q"), self.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(n_entries):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"), key)
        rows = []
        for _ in range(n_tensors):
            name = self.string()
            shape = tuple(self.scalar("Q") for _ in range(self.scalar("I")))[::-1]
            rows.append((name, shape, self.scalar("I"), self.scalar("Q")))
        alignment = int(metadata.get("general.alignment", 32))
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in rows:
            if name in tensors:
                raise ValueError(f"{self.path.name}: tensor {name!r} is listed twice; download the file again")
            tensors[name] = TensorInfo(name, shape, type_id, start + offset)
        return GGUFHeader(self.path, metadata, tensors)

    def scalar(self, code: str) -> Any:
        (found,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return found

    def string(self) -> str:
        size = self.scalar("Q")
        end = self.at + size
        if end > len(self.data):
            raise struct.error(f"a string of {size} bytes passes the end of the file")
        text = self.data[self.at : end].decode("utf-8", "replace")
        self.at = end
        return text

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"{self.path.name}: metadata {key!r} has unknown value type {kind}; update seal_jax")
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            code = f"<{count}{_SCALARS[item]}"
            found = struct.unpack_from(code, self.data, self.at)
            self.at += struct.calcsize(code)
            return list(found)
        return [self.value(item, key) for _ in range(count)]
