"""What a compiled TPU program moves: bytes to and from its memory (HBM) and between chips, read from its text.

XLA's own cost analysis counts the body of a loop once, however often it runs, so that a scan over 28 layers looks like
one layer. Here each computation counts as often as it is reached: a `while` whose condition compares its counter with
a constant runs so many times (that is how `lax.scan` compiles); of any other loop (sampling until a stop id) the body
is counted apart, as the traffic of one step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|[\s)}\]])([a-z][\w\-]*)\(")
#: Ops that move nothing by themselves.
_FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast while conditional call after-all partition-id replica-id "
    "opt-barrier iota add-dependency".split()
)
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
#: Ops that pass their operand on as it is.
_TRANSPARENT = ("bitcast", "reshape", "convert", "copy", "get-tuple-element")
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclass(frozen=True)
class Traffic:
    """Bytes per chip. `hbm`: read and written; `ici`: arriving from other chips."""

    hbm: float = 0.0
    ici: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.hbm + other.hbm, self.ici + other.ici)

    def __mul__(self, times: float) -> Traffic:
        return Traffic(self.hbm * times, self.ici * times)


@dataclass
class _Op:
    name: str
    opcode: str
    result: str  # its type, as text
    inside: str  # the text between its parentheses
    rest: str  # attributes
    root: bool

    @property
    def operands(self) -> list[str]:
        return _NAME.findall(self.inside)


@dataclass
class _Computation:
    ops: dict[str, _Op] = field(default_factory=dict)

    @property
    def root(self) -> _Op:
        return next(op for op in self.ops.values() if op.root)

    def parameter(self, number: int) -> str:
        """The name of a parameter."""
        return next(op.name for op in self.ops.values() if op.opcode == "parameter" and int(op.inside) == number)


def traffic(text: str, taken: float = 1.0) -> tuple[Traffic, Traffic]:
    """(of one call, of one step of its loops without a known number of steps) of a program's `as_text()`.

    `taken`: how often, of all times, a condition takes its dearer branch.
    """
    computations, entry = _parse(text)
    seen: dict[str, tuple[Traffic, Traffic]] = {}

    def of(name: str) -> tuple[Traffic, Traffic]:
        if name not in seen:
            total, step = Traffic(), Traffic()
            for op in computations[name].ops.values():
                more, inner = of_op(op, computations[name])
                total, step = total + more, step + inner
            seen[name] = total, step
        return seen[name]

    def of_op(op: _Op, within: _Computation) -> tuple[Traffic, Traffic]:
        if op.opcode == "while":
            body, inner = of(_attribute(op, "body"))
            trips = _trips(computations[_attribute(op, "condition")])
            return (body * trips, inner * trips) if trips is not None else (Traffic(), body + inner)
        if op.opcode == "conditional":
            branches = sorted((of(name) for name in _branches(op)), key=lambda found: found[0].hbm + found[1].hbm)
            cheap, dear = branches[0], branches[-1]
            call, step = (low * (1 - taken) + high * taken for low, high in zip(cheap, dear, strict=True))
            return call, step
        if op.opcode == "call":
            return of(_attribute(op, "to_apply"))
        return _moved(op, within, computations), Traffic()

    return of(entry)


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry, current = "", None
    for line in text.splitlines():  # a kernel's metadata may span lines, so a computation ends where the next begins
        if line.endswith("{") and (line.startswith("%") or line.startswith("ENTRY")):
            match = _NAME.search(line)
            assert match is not None
            current = computations[match[1]] = _Computation()
            entry = match[1] if line.startswith("ENTRY") else entry
        elif current is not None:
            found = _INSTRUCTION.match(line)
            if found:
                op = _operation(found[2], found[3], bool(found[1]))
                current.ops[op.name] = op
    return computations, entry


def _operation(name: str, right: str, root: bool) -> _Op:
    """`right` is TYPE OPCODE(OPERANDS), ATTRIBUTES; a type may be a tuple and its layouts hold parentheses."""
    end = _matching(right, 0) + 1 if right.startswith("(") else right.index(" ")
    result, right = right[:end], right[end:]
    match = _OPCODE.search(right)
    assert match is not None, right[:80]
    start = match.end() - 1
    stop = _matching(right, start)
    return _Op(name, match[1], result, right[start + 1 : stop], right[stop + 1 :], root)


def _matching(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i
    raise ValueError(f"unbalanced: {text[start : start + 80]}")


def _attribute(op: _Op, name: str) -> str:
    match = re.search(rf"\b{name}=%([\w.\-]+)", op.rest)
    assert match is not None, f"{op.name} has no {name}"
    return match[1]


def _branches(op: _Op) -> list[str]:
    match = re.search(r"branch_computations=\{([^}]*)\}", op.rest)
    return _NAME.findall(match[1]) if match else [_attribute(op, f"{way}_computation") for way in ("true", "false")]


def _trips(condition: _Computation) -> int | None:
    """How often a loop runs whose counter starts at 0 and goes up by 1, if that is what its condition says."""
    root = condition.root
    if root.opcode == "fusion" or root.opcode != "compare" or "direction=LT" not in root.rest:
        return None
    for name in root.operands:
        op = condition.ops.get(name)
        if op is not None and op.opcode == "constant":
            return int(op.inside)
    return None


def _moved(op: _Op, within: _Computation, computations: Mapping[str, _Computation]) -> Traffic:
    """What one op moves. A result or operand in the chip's on-core memories (S(1) and others) does not touch HBM."""
    if op.opcode in _FREE or op.opcode.endswith("-done"):
        return Traffic()
    kind = op.opcode.removesuffix("-start")
    inputs = [within.ops[name].result for name in op.operands if name in within.ops]
    if kind in _COLLECTIVES:
        # a chip's part is already there: what arrives of an all-gather is a little less than its result
        arriving = max(_bytes(op.result, everywhere=True), sum(_bytes(x, everywhere=True) for x in inputs))
        if op.opcode != kind:  # the type of a start holds operand and result
            arriving = max(_bytes(one, everywhere=True) for one in _split(op.result))
        times = 2 if kind == "all-reduce" else 1  # reduced in parts, then gathered
        return Traffic(sum(map(_bytes, inputs)) + (_bytes(op.result) if op.opcode == kind else 0), arriving * times)
    if op.opcode != kind:  # copy-start, slice-start: the type holds destination, source and a flag
        parts = _split(op.result)
        return Traffic(float(_bytes(parts[0])) + sum(min(_bytes(x), _size(parts[0])) for x in inputs))
    if op.opcode == "fusion":
        return Traffic(_fusion(op, inputs, computations[_attribute(op, "calls")], computations))
    return Traffic(_plain(op, inputs))


def _plain(op: _Op, inputs: list[str]) -> float:
    if op.opcode in _SLICES:
        return _bytes(op.result) + sum(min(_bytes(x), _size(op.result)) for x in inputs)
    if op.opcode == "dynamic-update-slice":  # in place
        return 2.0 * _size(inputs[1]) if _bytes(op.result) else 0.0
    return float(_bytes(op.result) + sum(map(_bytes, inputs)))


def _fusion(op: _Op, inputs: list[str], body: _Computation, computations: Mapping[str, _Computation]) -> float:
    """A parameter that is only sliced is read as far as it is sliced; an update in place writes the update."""
    total = float(_written(op.result, body, computations))
    for number, given in enumerate(inputs):
        if _bytes(given):
            total += _read(number, _size(given), body, computations)
    return total


def _read(number: int, full: int, body: _Computation, computations: Mapping[str, _Computation]) -> int:
    """Bytes that a fused computation reads of its parameter `number`, which has `full` bytes."""

    def of(name: str, body: _Computation) -> tuple[int, bool]:
        """What is read, and whether `name` is also what the computation gives back."""
        total, given = 0, body.ops[name].root
        for user in body.ops.values():
            for place, operand in enumerate(user.operands):
                if operand != name:
                    continue
                if user.opcode in _SLICES and place == 0:
                    total += _size(user.result)
                elif user.opcode == "dynamic-update-slice" and place == 0:
                    pass  # what is not updated stays where it is
                elif user.opcode in _TRANSPARENT:
                    more, out = of(user.name, body)
                    total, given = total + more, given or out
                elif user.opcode == "fusion":
                    inner = computations[_attribute(user, "calls")]
                    more, out = of(inner.parameter(place), inner)
                    total += more
                    if out:
                        more, out = of(user.name, body)
                        total, given = total + more, given or out
                else:
                    total += full
        return total, given

    total, given = of(body.parameter(number), body)
    return full if given else min(total, full)


def _written(result: str, body: _Computation, computations: Mapping[str, _Computation]) -> int:
    """Bytes that a fused computation writes: of a result that is an update in place, the update."""
    if not _bytes(result):
        return 0
    root = body.root
    while root.opcode in _TRANSPARENT and root.operands[0] in body.ops:
        root = body.ops[root.operands[0]]
    if root.opcode == "dynamic-update-slice":
        return _size(body.ops[root.operands[1]].result)
    if root.opcode == "fusion":
        return _written(result, computations[_attribute(root, "calls")], computations)
    if root.opcode == "tuple":
        parts = [body.ops[name] for name in root.operands]
        updates = [part for part in parts if part.opcode == "dynamic-update-slice"]
        whole = sum(_size(part.result) for part in updates)
        return max(0, _bytes(result) - whole) + sum(_size(body.ops[part.operands[1]].result) for part in updates)
    return _bytes(result)


def _split(result: str) -> list[str]:
    """The members of a tuple type."""
    return [match[0] for match in _SHAPE.finditer(result)]


def _size(result: str) -> int:
    return _bytes(result, everywhere=True)


def _bytes(result: str, *, everywhere: bool = False) -> int:
    """Bytes of a type that are in HBM (or anywhere)."""
    total = 0
    for match in _SHAPE.finditer(result):
        dtype, dims, layout = match.groups()
        if layout and "S(" in layout and not everywhere:
            continue
        bits = _BITS.get(dtype)
        if bits is None:
            digits = re.search(r"\d+", dtype)
            bits = int(digits[0]) if digits else 8
        n = 1
        for dim in filter(None, dims.split(",")):
            n *= int(dim)
        total += n * bits // 8
    return total
