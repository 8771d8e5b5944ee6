"""Our official decoders against the package's own, which are cut out of its installed source and run here.

(The modules that hold them import client libraries of a dozen model vendors, which nobody needs.)
"""

import ast
import json
import random
import re
import time
from types import SimpleNamespace

import pytest

from seal_jax.chat.official import DECODERS, MAX_CHARS, decode_llama31, decode_prompting, decode_qwen_fc
from seal_jax.envs.bfcl import package
from seal_jax.types import Call, Unevaluated


def cut_out(path, *names):
    """Functions and methods of a source file, without decorators, as a namespace."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in names]
    assert {n.name for n in found} == set(names)
    for node in found:
        node.decorator_list = []
    formats = SimpleNamespace(PYTHON="python", JAVA=0, JAVASCRIPT=1, VERBOSE_XML=2, CONCISE_XML=3, JSON=4)
    space = {"ast": ast, "re": re, "json": json, "ReturnFormat": formats, "eval": harmless_eval}
    exec(compile(ast.Module(found, []), str(path), "exec", flags=annotations()), space)
    return space


def annotations():
    import __future__

    return __future__.annotations.compiler_flag


def harmless_eval(source):
    """The package evaluates operators: with nothing in reach, and nothing that takes for ever."""
    if "**" in source or "<<" in source:
        raise ValueError("not in these tests")
    return eval(source, {"__builtins__": {}})


@pytest.fixture(scope="module")
def theirs():
    try:
        folder = package.package_folder() / "model_handler"
    except ImportError as missing:
        pytest.skip(str(missing))
    utils = cut_out(
        folder / "utils.py",
        *("ast_parse", "resolve_ast_call", "resolve_ast_by_type", "default_decode_execute_prompting"),
        *("decoded_output_to_execution_list", "parse_nested_value", "convert_to_function_call"),
    )
    qwen = cut_out(
        folder / "local_inference" / "qwen_fc.py",
        *("decode_execute", "_extract_tool_calls", "_parse_query_response_prompting"),
    )
    qwen |= {"convert_to_function_call": utils["convert_to_function_call"]}
    handler = SimpleNamespace(_extract_tool_calls=qwen["_extract_tool_calls"])
    llama = cut_out(folder / "local_inference" / "llama_3_1.py", "decode_execute")

    def qwen_fc(text):
        response = SimpleNamespace(
            choices=[SimpleNamespace(text=text)], usage=SimpleNamespace(prompt_tokens=0, completion_tokens=0)
        )
        cleaned = qwen["_parse_query_response_prompting"](handler, response)["model_responses"]
        return qwen["decode_execute"](handler, cleaned, False)

    return {
        "qwen_fc": qwen_fc,
        "prompting": utils["default_decode_execute_prompting"],
        "toolace": utils["default_decode_execute_prompting"],
        "llama31": lambda text: llama["decode_execute"](None, text, False),
    }


def read(line):
    """A call line as Python reads it, so that white space does not count; what it cannot read stays as it is."""
    try:
        return ast.dump(ast.parse(line, mode="eval"))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return re.sub(r"\s*([,(])\s*", r"\1", line)


def check(theirs, decoder, text):
    try:
        expected = theirs[decoder](text)
    except Exception:
        expected = []
    ours = [str(call) for call in DECODERS[decoder](text)]
    assert list(map(read, ours)) == list(map(read, expected)), text
    return bool(expected)


def tagged(*bodies):
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


ONE = '{"name": "f", "arguments": {"a": 1}}'
QWEN = {
    tagged(ONE): "f(a=1)",
    f"<tool_call>{ONE}</tool_call>": "",  # the tags need lines of their own
    f"<tool_call>\n{ONE}</tool_call>": "",
    "some words": "",
    "": "",
    tagged('{"name": "f", "arguments": {}}'): "f()",
    tagged('{"name": "f", "arguments": {"a": {}}}'): "f(a={})",  # an empty dict is kept here
    tagged('{"name": "f", "arguments": {"a": {"b": {"c": 1}}}}'): "f(a={'b': {'c': 1}})",
    tagged('{"name": "f", "arguments": "{\\"a\\": [true, null, 1.0]}"}'): "f(a=[True, None, 1.0])",
    tagged('{"name": "f", "arguments": [1]}'): "",
    tagged('{"name": "f", "arguments": null}'): "",
    tagged('{"name": "f"}'): "",
    tagged('{"name": "f", "parameters": {}}'): "",
    tagged('{"name": ["f"], "arguments": {}}'): "",
    tagged("[1]"): "",
    tagged(ONE, "not json"): "f(a=1)",  # a body that is not JSON is skipped,
    tagged(ONE, "{}"): "",  # one that is no call costs the whole message
    tagged(ONE, '{"name": "g", "arguments": {"b": "x"}}'): "f(a=1) g(b='x')",
    f"before {tagged(ONE)} after": "f(a=1)",
    f"<think>\n{tagged(ONE)}\n</think>\n\nno": "",  # drafted in the reasoning
    f"<think>\nhm\n</think>\n\n{tagged(ONE)}": "f(a=1)",
    f"<think>\n{tagged(ONE)}": "f(a=1)",  # reasoning that never closes is not taken off
    tagged('{"name": "f", "arguments": {"a": 1, "a": 2}}'): "f(a=2)",
    tagged('{"name": "f", "arguments": {"a": NaN}}'): "f(a=nan)",
    tagged('{"name": "f", "arguments": {"a": "\\u00e9\\n\'\\""}}'): "f(a='é\\n\\'\"')",
}
PROMPTING = {
    "[f(a=1), g(b='x')]": "f(a=1) g(b='x')",
    "f(a=1), g()": "f(a=1) g()",  # brackets are added
    "```\n[f(a=1)]\n```": "f(a=1)",
    "```python\n[f(a=1)]\n```": "",
    "[]": "",
    "All done.": "",
    "": "",
    "[f(1, a=2)]": "f(a=2)",  # positional arguments are dropped
    "[f(a=1), 2]": "",
    "[f(a=1)][0]": "",
    "[f(a={})]": "",  # an empty dict costs the whole message
    "[f(a={'b': 1})]": "f(a={'b': 1})",
    "[f(a={'b': {'c': 1}})]": "f(a=b(c=1))",  # dicts in a dict become a call,
    "[f(a={'b': {'c': 1}, 'd': 2})]": "f(a={'b': {'c': 1}, 'd': 2})",
    "[f(a=[{'b': {'c': 1}}])]": "f(a=[{'b': {'c': 1}}])",  # but not in a list
    "[f(a={1: 2})]": "f(a={'1': 2})",
    "[f(a=g(b=1))]": "f(a=g(b=1))",
    "[f(a=g())]": "f(a='g()')",
    "[f(a=g(1))]": "f(a='g(1)')",
    "[f(a=name)]": "f(a='name')",
    "[f(a=true, b=None)]": "f(a='true', b=None)",
    "[f(a=-1, b=+2, c=not True, d=~3)]": "f(a=-1, b=-2, c=-1, d=-3)",
    "[f(a=--1)]": "",
    "[f(a=2*3+1)]": "f(a=7)",
    "[f(a='x' + 'y')]": "f(a='xy')",
    "[f(a=1/0)]": "",
    "[f(a=x+1)]": "",
    "[f(a=(1, 2))]": "f(a=(1, 2))",
    "[f(a={1, 2})]": "",
    "[f(a=x[0])]": "f(a='x[0]')",
    "[f(a=x.y)]": "",
    "[f(a=lambda: 1)]": "",
    "[f(a=lambda: __import__('os'))]": "",
    "[f(a=f'{b}')]": "",
    "[f(a=1 if b else 2)]": "",
    "[f(a=...)]": "f(a='...')",
    "[f(a=1e999)]": "f(a=inf)",
    "[a.b.c(x=1)]": "a.b.c(x=1)",
    "[f(**{'a': 1})]": "f(None={'a': 1})",
    "[f(a=1, a=2)]": "f(a=2)",
    "[f(a='it\\'s')]": 'f(a="it\'s")',
    "[f(a={'it\\'s': 1})]": "f(a={'it's': 1})",
    "[f(a=b'x', c=1j)]": "f(a=b'x', c=1j)",
    "'[f(a=1)]'": "",
    "f(a='x'": "",
    "[f(a=1)]\n[g(a=1)]": "",
    "[f(a=1), [g()]]": "",
    "[f()(a=1)]": "(a=1)",
}
LLAMA = {
    '{"name": "f", "parameters": {"a": 1}}': "f(a=1)",
    '<|python_tag|>{"name": "f", "parameters": {"a": "x"}}': "f(a='x')",
    '{"name": "f", "parameters": {"a": true}}': "",  # read as Python
    '{"name": "f", "parameters": {"a": True}}': "f(a=True)",
    '{"name": "f", "parameters": {"a": true}}; {"name": "g", "parameters": {}}': "f(a=True) g()",  # read as JSON
    '{"name": "f", "parameters": {}};': "",
    '{"name": "f", "parameters": {"a": ";"}}': "",
    '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]': "f(a=1) g()",
    '{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}': "f() g()",
    '{"name": "f", "arguments": {}}': "",
    '{"name": "f", "parameters": {"a": {}}}': "f(a={})",
    '{"name": "f", "parameters": {"a": 2*3}}': "f(a=6)",
    "[]": "",
    "Done.": "",
    "": "",
}
TABLE = [
    *(("qwen_fc", text, calls) for text, calls in QWEN.items()),
    *(("prompting", text, calls) for text, calls in PROMPTING.items()),
    *(("toolace", text, calls) for text, calls in PROMPTING.items()),
    *(("llama31", text, calls) for text, calls in LLAMA.items()),
]


@pytest.mark.parametrize(("decoder", "text", "calls"), TABLE)
def test_the_table_is_ours_and_the_packages(theirs, decoder, text, calls):
    assert " ".join(map(str, DECODERS[decoder](text))) == calls
    check(theirs, decoder, text)


def any_value(rng, depth=0):
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind < 6:
        return rng.choice(
            [0, -3, 2.5, 1e300, True, None, "", "a", "it's", 'say "x"', "f(a=1)", "é\n\\", "</tool_call>"]
        )
    if kind == 6:
        return [any_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(["a", "b c", "it's", "1", "\\n"]): any_value(rng, depth + 1) for _ in range(rng.randrange(3))}


def any_call(rng):
    return rng.choice(["f", "g", "a.b", "f ", "print"]), {
        rng.choice(["a", "b", "c"]): any_value(rng) for _ in range(rng.randrange(4))
    }


def any_message(rng, decoder):
    calls = [any_call(rng) for _ in range(rng.randrange(1, 4))]
    if decoder == "qwen_fc":
        bodies = [json.dumps({"name": n, "arguments": json.dumps(a) if rng.random() < 0.2 else a}) for n, a in calls]
        return rng.choice(["", "ok\n", "<think>\nhm\n</think>\n\n"]) + tagged(*bodies)
    if decoder == "llama31":
        bodies = [{"name": n, "parameters": a} for n, a in calls]
        return "; ".join(map(json.dumps, bodies)) if rng.random() < 0.5 else repr(bodies)
    listed = ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)
    return rng.choice([f"[{listed}]", listed, f"```[{listed}]```\n"])


def damaged(rng, text):
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(text) + 1)
        piece = rng.choice(
            ["", "(", "]", "{}", "'", '"', ",", "-", "\n", "x", "=", ";", "1+", "<tool_call>\n", "</think>"]
        )
        text = text[:at] + piece + text[at + rng.randrange(2) :]
    return text


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")
@pytest.mark.parametrize("decoder", ["qwen_fc", "prompting", "llama31"])
def test_random_messages_decode_as_in_the_package(theirs, decoder):
    rng = random.Random(0)
    decodable = sum(check(theirs, decoder, damaged(rng, any_message(rng, decoder))) for _ in range(500))
    assert 100 < decodable < 480  # both kinds were met


def test_what_only_an_evaluator_could_read_is_kept_as_source():
    (call,) = decode_prompting("[f(a=g(b=1), c='g(b=1)', d={'x': {'y': 1}})]")
    assert call.arguments == {"a": "g(b=1)", "c": "g(b=1)", "d": "x(y=1)"}
    assert [isinstance(v, Unevaluated) for v in call.arguments.values()] == [True, False, True]
    assert decode_qwen_fc(tagged('{"name": "f ", "arguments": {"a": 1e999}}')) == (
        Call("f", {"a": Unevaluated("inf")}),
    )


def test_names_are_names():
    """Where the package would run what a name smuggles in, there is an unknown name."""
    (call,) = decode_qwen_fc(tagged('{"name": "g() or f", "arguments": {"a=1, b": 2}}'))
    assert call == Call("g() or f", {"a=1, b": 2})


@pytest.mark.parametrize("decoder", DECODERS)
def test_nothing_a_model_writes_raises_or_hangs(decoder):
    start = time.perf_counter()
    for text in (
        "[" * 100_000,
        "(" * 100_000,
        "-" * 100_000 + "1",
        "f(a=" * 20_000 + ")" * 20_000,
        "[f(a=" + "[" * 250 + "]" * 250 + ")]",
        "[f(a=9**9**9)]",
        "[f(a=1<<10**10)]",
        "[f(a=1<<9999<<9999<<9999)]",
        f"[f(a={'9' * 5000})]",
        f"[f(a=0x{'f' * 5000})]",
        "[f(a='\ud800\0')]",
        "x" * (MAX_CHARS + 1),
        "<tool_call>\n" * 20_000,
        tagged('{"name": "f", "arguments": ' + '{"a": ' * 5000 + "1" + "}" * 5001),
        '{"name": "f", "parameters": ' + '{"a": ' * 5000 + "1" + "}" * 5001,
        '{"name": "f", "parameters": {"a": 9**9**9}}',
        "a." * 100_000 + "b()",
        "f(a=" + "a." * 50_000 + "b)",
        "f(a=1" + "+1" * 50_000 + ")",
    ):
        assert isinstance(DECODERS[decoder](text), tuple)
    assert time.perf_counter() - start < 10


def test_the_decoders_by_name():
    assert DECODERS["qwen_fc"] is decode_qwen_fc and DECODERS["llama31"] is decode_llama31
    assert DECODERS["prompting"] is DECODERS["toolace"] is decode_prompting
