"""What the package's executor does to calls and to state by its construction, for verdicts equal to its own.

The package (bfcl-eval) writes every call as Python source, rewrites the source and evaluates it in one namespace for
all instances. seal_jax hands values to bound methods, on worlds of their own. Where the two differ, the package's
behaviour is either semantics, which every world of ours has (see execution.py), or an accident of that construction.
The accidents below are reproduced with `BfclSuite(official_quirks=True)` and never otherwise:

1. An identifier before "(" is rewritten wherever it stands, also inside string arguments: the name of a tool gets the
   name of its instance in front, and blanks before the "(" are lost even if the name is unknown. `total (x)` becomes
   `total(x)`, and `sort (x)` becomes `<instance>.sort(x)`, where policy and reference have different instance names.
2. The source is read back as Python. Blanks around names disappear, argument names are normalised (NFKC), lists nested
   200 deep and argument names that are keywords are syntax errors, and infinity and NaN, which have no literals, are
   undefined names. A name or an argument name that is not an identifier can so hold a whole argument. (A call of a tool
   inside an argument, which a decoder leaves as source, is no accident: every world of ours runs it.)
3. Policy and reference share mutable default arguments (`post_tweet`) and the credit cards and booking records that
   the long-context category adds. They share them within one verification only: the package shares them between all
   tasks of a process, which makes a verdict depend on the tasks before it.

Never reproduced, because it would run what the policy wrote, or never end: expressions, and names of Python's own or of
the executor's module (`print`, `len`, `json.dumps`) are no tools; the guards, the time limit and the size limit of a
call (worlds.py, execution.py) hold; a state that grows without bound, or holds itself, is a mismatch, where the
package's comparison does not return or breaks off.

An instance name begins with the name of the evaluated model, and rewritten text can reach a result: the price of a
flight depends on the digits in its date. `official_quirks="NAME"` names the model; True stands for "model".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from seal_jax.envs.execution import DENIED_NAMES, InstanceWorld, public_tools
from seal_jax.types import Call, CallResult, ErrorKind, Unevaluated

#: Characters of a call's source; beyond it the call is refused (reading it back would take seconds without a limit).
MAX_SOURCE_CHARS = 1_000_000
_CALLED = re.compile(r"\b([a-zA-Z_]\w*)\s*(?=\()")


class QuirkyWorld:
    """An InstanceWorld whose calls go through source text, as the package's do. See the module's list, 1 and 2.

    Args:
      world: executes what was read back.
      instance_names: {tool name: name of its instance, as the package would call it}.
    """

    def __init__(self, world: InstanceWorld, instance_names: Mapping[str, str]) -> None:
        self._world = world
        self._instance_names = dict(instance_names)

    def tool_names(self) -> frozenset[str]:
        return self._world.tool_names()

    def state(self) -> Mapping[str, Mapping[str, Any]]:
        return self._world.state()

    def call(self, call: Call) -> CallResult:
        """As InstanceWorld.call; the result names the call that was executed, as it was read back."""
        try:
            read = read_back(call, self._instance_names)
        except NotReadable as error:
            return CallResult(call, f"Error during execution: {error}", error.kind, error.detail)
        return self._world.call(read)


class NotReadable(Exception):
    def __init__(self, message: str, kind: ErrorKind, detail: str) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.detail = detail


def read_back(call: Call, instance_names: Mapping[str, str]) -> Call:
    """The call that the package would execute for this one: written as source, rewritten, read. Nothing is evaluated.

    Raises NotReadable, with the words of Python's own error where it has any.
    """
    try:
        written = str(call)
    except (ValueError, RecursionError) as error:  # integers and nesting that Python does not print
        raise NotReadable(str(error), "argument_type", type(error).__name__) from None
    if len(written) > MAX_SOURCE_CHARS:
        message = f"call of {len(written)} characters exceeds the limit of {MAX_SOURCE_CHARS}"
        raise NotReadable(message, "size_limit", f"{MAX_SOURCE_CHARS} characters")
    known, instances = instance_names.get, frozenset(instance_names.values())
    source = _CALLED.sub(lambda m: f"{known(m[1])}.{m[1]}" if known(m[1]) else m[1], written)
    parts = source.split("(")[0].split(".")
    bare_name = parts[1] if len(parts) > 1 else parts[0]
    if bare_name in DENIED_NAMES:
        raise NotReadable(f"Function call {bare_name} is not allowed.", "unknown_tool", "not allowed")
    try:
        node = ast.parse(source.lstrip(" \t"), "<string>", "eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        unknown: ErrorKind = "argument_type" if call.name in instance_names else "unknown_tool"
        raise NotReadable(str(error), unknown, "not Python") from None
    if not isinstance(node, ast.Call):
        raise NotReadable("not a call", "unknown_tool", call.name)
    tool = _tool(node.func, instance_names)
    values = [*node.args, *(keyword.value for keyword in node.keywords)]
    nameless = [n for value in values for n in ast.walk(value) if isinstance(n, ast.Name) and n.id not in instances]
    if nameless:
        first = min(nameless, key=lambda n: (n.lineno, n.col_offset)).id
        raise NotReadable(f"name '{first}' is not defined", "argument_type", first)
    try:
        positional = tuple(ast.literal_eval(value) for value in node.args)
        arguments = {str(k.arg): _value(k.value, instance_names) for k in node.keywords if k.arg}
    except (ValueError, TypeError) as error:
        raise NotReadable(str(error), "argument_type", "not a literal") from None
    return Call(tool, arguments, positional)


def _value(node: ast.expr, instance_names: Mapping[str, str]) -> Any:
    """A literal's value; a call of a tool stays source, for the world that runs it (see InstanceWorld)."""
    if any(isinstance(n, ast.Call) for n in ast.walk(node)):
        return Unevaluated(ast.unparse(_WithoutInstances(instance_names).visit(node)))
    return ast.literal_eval(node)


class _WithoutInstances(ast.NodeTransformer):
    """`<instance>.tool` → `tool`."""

    def __init__(self, instance_names: Mapping[str, str]) -> None:
        self._instance_names = instance_names

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and self._instance_names.get(node.attr) == node.value.id:
            return ast.Name(node.attr, ast.Load())
        return node


def _tool(function: ast.expr, instance_names: Mapping[str, str]) -> str:
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        if instance_names.get(function.attr) == function.value.id:
            return function.attr
    while isinstance(function, ast.Attribute):
        function = function.value
    name = function.id if isinstance(function, ast.Name) else "call"
    raise NotReadable(f"name '{name}' is not defined", "unknown_tool", name)


def instance_names(prefix: str, task_id: str, instances: Mapping[str, object]) -> dict[str, str]:
    """{tool name: name of its instance, as the package makes it from the model's name}."""
    names = {cls: re.sub(r"[-./:]", "_", f"{prefix}_{task_id}_{cls}_instance") for cls in instances}
    return {tool: names[cls] for tool, cls in public_tools(instances).items()}
