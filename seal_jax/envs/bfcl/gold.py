"""Reads reference calls, which BFCL writes as Python source, without running any of it."""

from __future__ import annotations

import ast

from seal_jax.types import Call, Program, Task


def parse_call(source: str) -> Call:
    """`"cd(folder='a')"` → Call. Positional and keyword arguments, literal values only; ValueError otherwise."""
    try:
        node = ast.parse(source.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"reference call {source!r} is not a Python expression: {error.msg}") from None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"reference call {source!r} is not a call of a plain name")
    try:
        positional = tuple(ast.literal_eval(argument) for argument in node.args)
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    except ValueError:
        raise ValueError(f"reference call {source!r} has an argument that is not a literal") from None
    if None in arguments:
        raise ValueError(f"reference call {source!r} unpacks a mapping; write the arguments out")
    return Call(node.func.id, {str(name): value for name, value in arguments.items()}, positional)


def with_named_arguments(program: Program, task: Task) -> Program:
    """The program with every argument under its documented name: 160 of the 4,625 reference calls have positional
    ones, which no chat format can write and no diagnosis can compare with a policy's. The docs' order is the tools'."""
    docs = {doc["name"]: doc for doc in (*task.tools, *(doc for turn in task.turns for doc in turn.reveals))}
    named = []
    for call in program:
        names = docs.get(call.name, {}).get("parameters", {}).get("properties", {})
        arguments = {**dict(zip(names, call.positional, strict=False)), **call.arguments}
        named.append(Call(call.name, arguments, call.positional[len(names) :]))
    return tuple(named)
