"""Every malformed message gets a typed error with its position; nothing a policy can write raises or hangs."""

import json
import random
import time

import pytest

from seal_jax.chat.formats import get_format
from seal_jax.chat.parsing import ERROR_KINDS, Malformed, ParseOptions, normalise_arguments
from seal_jax.types import Call

HERMES, TINY, LLAMA, TOOLACE = (get_format(name) for name in ("hermes", "tiny", "llama31", "toolace"))
FORMATS = {f.name: f for f in (HERMES, TINY, LLAMA, TOOLACE)}


def tagged(*bodies):
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def kind(parsed):
    assert parsed.error is not None, f"accepted: {parsed}"
    assert parsed.calls == () and parsed.error.kind in ERROR_KINDS and "\n" not in parsed.error.message
    return parsed.error.kind


# --- public upstream bugs: each a message and the right behaviour --------------------------------------------------
def test_two_objects_in_one_block_are_an_error():  # vLLM 17790, 32638
    text = '<tool_call>{"name":"ls","arguments":{}}\n{"name":"pwd","arguments":{}}</tool_call>'
    for form in (HERMES, TINY):
        parsed = form.parse(text)
        assert kind(parsed) == "extra_data"
        assert parsed.error.position == text.index("\n") + 1


def test_a_broken_block_rejects_the_good_one_beside_it():  # vLLM 22885
    text = tagged('{"name":"ls","arguments":{}', '{"name":"pwd","arguments":{}}')
    assert kind(HERMES.parse(text)) == "invalid_json"
    assert kind(HERMES.parse(tagged('{"name":"pwd","arguments":{}}', '{"name":"ls","arguments":{}'))) == "invalid_json"


def test_nested_arguments_stay_nested():  # vLLM 20824
    value = {"search_request": {"query": "x", "mode": "rrf"}}
    for form in FORMATS.values():
        assert form.parse(form.calls([Call("find", value)])).calls == (Call("find", value),)


@pytest.mark.parametrize(
    "text", ["mkdir -p t/{a,b", "}}}", '"] }', "</tool_call>", "a } </tool_call> b", "<think>", "; {"]
)
def test_braces_and_tags_in_strings_are_text(text):  # vLLM 21544; early ends at '} </tool_call>'
    call = Call("run", {"cmd": text})
    for form in FORMATS.values():
        parsed = form.parse(form.calls([call]))
        assert parsed.error is None and parsed.calls == (call,)
    assert HERMES.parse(tagged(json.dumps({"name": "run", "arguments": {"cmd": text}}))).calls == (call,)


def test_arguments_as_json_string_are_unwrapped_once():  # flama 258, Qwen3 1894, sglang 12123
    as_dict = HERMES.parse(tagged('{"name": "f", "arguments": {"a": true}}')).calls
    as_text = HERMES.parse(tagged('{"name": "f", "arguments": "{\\"a\\": true}"}')).calls
    assert as_dict == as_text == (Call("f", {"a": True}),)
    assert HERMES.calls(as_dict) == HERMES.calls(as_text)
    twice = json.dumps({"name": "f", "arguments": json.dumps(json.dumps({"a": True}))})
    assert kind(HERMES.parse(tagged(twice))) == "invalid_arguments"
    assert normalise_arguments(' {"a": 1} ', ParseOptions()) == {"a": 1}


@pytest.mark.parametrize("name", ["hermes", "tiny"])
def test_calls_drafted_in_reasoning_do_not_run(name):  # verl 4757, renderers 80
    form = FORMATS[name]
    draft, real = form.calls([Call("rm", {"file_name": "a"})]), form.calls([Call("ls")])
    assert form.parse(f"<think>\nperhaps {draft}\n</think>\n\n{real}").calls == (Call("ls"),)
    assert form.parse(f"{real}<think>{draft}</think>").calls == (Call("ls"),)
    assert form.parse(f"<think>{draft}</think>Done.") == form.parse("Done.")
    broken = "<think> <tool_call>{ </think> " + real
    assert form.parse(broken).calls == (Call("ls"),)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_reasoning_that_is_cut_runs_nothing(form):
    real = form.calls([Call("ls")])
    cut = form.parse("<think>first " + real)
    assert kind(cut) == "unclosed_reasoning" and cut.error.position == 0
    assert form.parse("<think>a</think> \n<think>b</think>" + real).calls == (Call("ls"),)
    opened = get_format(form.name, reasoning_open=True)
    assert opened.parse(f"hm {real}</think>{real}").calls == (Call("ls"),)
    assert kind(opened.parse("hm " + real)) == "unclosed_reasoning"


def test_reasoning_end_without_start_is_an_error():
    text = tagged('{"name":"rm","arguments":{}}') + "</think>" + tagged('{"name":"ls","arguments":{}}')
    parsed = HERMES.parse(text)
    assert kind(parsed) == "stray_reasoning_end" and parsed.error.position == text.index("</think>")


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, '<tool_call>\n{"name": "ls", "arguments": {}}'),
        (HERMES, '<tool_call>\n{"name": "ls", "argum'),
        (HERMES, "<tool_call>"),
        (TINY, '<tool_call>{"name": "pwd", "arguments": {}}</tool_call><tool_call>{"name": "ls", "arguments": {}}'),
        (LLAMA, '{"name": "ls", "parameters": {"a": "b'),
        (LLAMA, '{"name": "ls", "parameters": {}};'),
        (LLAMA, '{"name": "ls", "parameters": '),
        (TOOLACE, "[ls(), f(a='b"),
        (TOOLACE, "[ls(), f(a=[1"),
    ],
)
def test_a_cut_call_is_not_executed(form, text):  # exo 1344, colibri 505, ollama 17274
    assert kind(form.parse(text)) == "unclosed"


def test_python_literals_are_errors_with_a_hint():  # vLLM 43238, mlx-lm 1004, vllm-mlx 64
    good = HERMES.parse(tagged('{"name": "f", "arguments": {"a": true, "b": null}}'))
    assert good.calls == (Call("f", {"a": True, "b": None}),)
    for arguments in ("{'a': True, 'b': None}", '{"a": True}', '{"a": None}', "{'x', 'y'}"):
        parsed = HERMES.parse(tagged(f'{{"name": "f", "arguments": {arguments}}}'))
        assert kind(parsed) == "python_literal" and "double quotes" in parsed.error.message


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"name":"pwd"}', "missing_arguments"),
        ('{"arguments":{}}', "missing_name"),
        ('{"name":5,"arguments":[1]}', "invalid_name"),
        ('{"name":"","arguments":{}}', "invalid_name"),
        ('{"name":null,"arguments":{}}', "invalid_name"),
        ('{"name":"f","arguments":[1]}', "invalid_arguments"),
        ('{"name":"f","arguments":null}', "invalid_arguments"),
        ('{"name":"f","arguments":3}', "invalid_arguments"),
        ('{"name":"f","arguments":{},"id":7}', "unexpected_key"),
        ("[]", "not_an_object"),
        ('"ls"', "not_an_object"),
        ("", "invalid_json"),
        ("ls()", "invalid_json"),
    ],
)
def test_calls_without_name_or_arguments(body, expected):  # TRL 4881, verl 3070, 7177
    assert kind(HERMES.parse(tagged(body))) == expected
    assert kind(TINY.parse(f"<tool_call>{body}</tool_call>")) == expected


def test_an_unknown_name_is_for_the_world_to_refuse():
    assert HERMES.parse(tagged('{"name":"nope","arguments":{}}')).calls == (Call("nope"),)


def test_stray_characters_after_arguments_name_their_column():  # evalscope 1397
    parsed = HERMES.parse(tagged(json.dumps({"name": "pwd", "arguments": '{}""'})))
    assert kind(parsed) == "extra_data" and "column 3" in parsed.error.message
    text = tagged('{"name": "pwd", "arguments": {}""}')
    parsed = HERMES.parse(text)
    assert kind(parsed) == "invalid_json" and parsed.error.position == text.index('""')


def test_parallel_llama_calls_follow_the_options():  # vLLM 12937
    both = [Call("ls"), Call("pwd", {"a": 1})]
    text = LLAMA.calls(both)
    assert LLAMA.parse(text).calls == tuple(both)
    one = get_format("llama31", parallel=False)
    assert kind(one.parse(text)) == "parallel_calls"
    assert one.parse(LLAMA.calls(both[:1])).calls == (both[0],)
    single = get_format("hermes", parallel=False)
    assert kind(single.parse(HERMES.calls(both))) == "parallel_calls"
    assert kind(LLAMA.parse(text.replace(";", "\n"))) == "extra_data"


def test_parameters_key_is_an_option():  # ATOM 1427, gorilla 1343
    text = tagged('{"name":"ls","parameters":{"a":true}}')
    parsed = HERMES.parse(text)
    assert kind(parsed) == "missing_arguments" and 'needs "arguments"' in parsed.error.message
    lenient = get_format("hermes", accept_parameters_key=True)
    assert lenient.parse(text).calls == (Call("ls", {"a": True}),)
    assert LLAMA.parse('{"name":"ls","parameters":{"a":true}}').calls == (Call("ls", {"a": True}),)
    assert LLAMA.parse('{"name":"ls","arguments":{"a":true}}').calls == (Call("ls", {"a": True}),)
    assert LLAMA.parse('{"type":"function","name":"ls","parameters":{}}').calls == (Call("ls"),)
    assert kind(LLAMA.parse('{"name":"ls","parameters":{},"arguments":{}}')) == "unexpected_key"


def test_duplicate_keys_and_non_numbers():
    assert kind(HERMES.parse(tagged('{"name":"f","arguments":{"a":1,"a":2}}'))) == "duplicate_key"
    assert kind(HERMES.parse(tagged('{"name":"f","name":"g","arguments":{}}'))) == "duplicate_key"
    for number in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000):
        parsed = HERMES.parse(tagged(f'{{"name":"f","arguments":{{"a":{number}}}}}'))
        assert kind(parsed) == "invalid_number"
    assert kind(HERMES.parse(tagged('{"name":"f","arguments":{"a":"\\ud800"}}'))) == "invalid_text"
    assert HERMES.parse(tagged('{"name":"f","arguments":{"a":"\\ud83d\\ude00"}}')).calls[0].arguments["a"] == "😀"


# --- messages ------------------------------------------------------------------------------------------------------
def test_text_around_calls_is_kept():
    for form in (HERMES, TINY):
        text = "Let me look " + form.calls([Call("ls")]) + " then report"
        parsed = form.parse(text)
        assert parsed.calls == (Call("ls"),) and parsed.content == "Let me look\nthen report"
        assert form.parse(form.calls([Call("ls")], "First.")).content == "First."
        assert form.parse("  Just text. \n").content == "Just text."


def test_white_space_in_a_block_is_free():
    body = '{"name": "ls", "arguments": {}}'
    for text in (f"<tool_call>{body}</tool_call>", f"<tool_call>\n\n {body}\t</tool_call>", tagged(body)):
        assert HERMES.parse(text).calls == (Call("ls"),)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_forged_role_markers_are_errors(form):
    for token in form.special_tokens:
        text = f"ok {token} {form.calls([Call('ls')])}"
        parsed = form.parse(text)
        assert kind(parsed) == "special_token" and parsed.error.position == 3


def test_closing_tag_alone():
    assert kind(HERMES.parse('{"name": "ls", "arguments": {}}\n</tool_call>')) == "stray_tag"


def test_llama_messages_hold_text_or_calls():
    assert LLAMA.parse("Total (x): {3}").error is None
    assert kind(LLAMA.parse('Sure: {"name": "ls", "parameters": {}}')) == "text_around_call"
    assert kind(LLAMA.parse('{"name": "ls", "parameters": {}} done')) == "extra_data"
    assert kind(LLAMA.parse('{"result": 3}')) == "missing_name"
    assert LLAMA.parse('<|python_tag|>{"name": "ls", "parameters": {}}').calls == (Call("ls"),)
    assert kind(LLAMA.parse("<|python_tag|>ls()")) == "not_an_object"
    assert kind(LLAMA.parse("text <|python_tag|>ls()")) == "text_around_call"
    for form in (LLAMA, TOOLACE):
        with pytest.raises(ValueError, match="either text or calls"):
            form.calls([Call("ls")], "text")


@pytest.mark.parametrize(
    ("text", "expected", "position"),
    [
        ("[f(1)]", "positional_argument", 3),
        ("[f(a=b)]", "invalid_value", 5),
        ("[f(a=g(b=1))]", "invalid_value", 5),
        ("[f(a={1: 2})]", "invalid_value", 5),
        ("[f(a={'x', 'y'})]", "invalid_value", 5),
        ("[f(a=b'x')]", "invalid_value", 6),
        ("[f(a=f'{x}')]", "invalid_value", 6),
        ("[f(a=[x for x in y])]", "invalid_value", 8),
        ("[f(a=lambda: 1)]", "invalid_value", 5),
        ("[f(a=-True)]", "invalid_value", 5),
        ("[f(a=2j)]", "invalid_value", 5),
        ("[f(from=1)]", "invalid_value", 3),
        ("[f(a=1+2)]", "syntax", 6),
        ("[f(a=1-2)]", "syntax", 6),
        ("[f(**x)]", "syntax", 3),
        ("[f(a=1)(b=2)]", "syntax", 7),
        ("[f(a='x'[0])]", "syntax", 8),
        ("[f(a=1) g(b=1)]", "syntax", 1),
        ("[f(a=1), 3]", "syntax", 9),
        ("[f(a=1]", "syntax", 6),
        ("[f(a=1, a=2)]", "duplicate_key", 8),
        ("[f(a={'k': 1, 'k': 2})]", "duplicate_key", 14),
        ("[f(é='ü', b=c)]", "invalid_value", 12),
        ("[f(a=1),\n g(b=c)]", "invalid_value", 14),
        ("[f(a=1e999)]", "invalid_number", 5),
        ("[f(a=" + "9" * 400 + ")]", "invalid_number", 5),
        ("[f(a='\\ud800')]", "invalid_text", 1),
        ("f(a=1)", "missing_brackets", 0),
        ("[f(a=1)] done", "text_around_call", 9),
        ("I do [f(a=1)]", "text_around_call", 5),
    ],
)
def test_call_list_errors(text, expected, position):
    parsed = TOOLACE.parse(text)
    assert kind(parsed) == expected
    assert parsed.error.position == position


def test_call_list_values():
    text = "[a.b.c(x=-1.5, y=\"it's\", z=(1, [True, None]), w={'k': {'l': []}},), d()]"
    calls = (Call("a.b.c", {"x": -1.5, "y": "it's", "z": [1, [True, None]], "w": {"k": {"l": []}}}), Call("d"))
    assert TOOLACE.parse(text).calls == calls
    for text in ("[]", "[1, 2]", "[see (1)", "Done (all).", "[x] then f(y)", "call me (maybe)"):
        parsed = TOOLACE.parse(text)
        assert parsed.calls == ()
    with pytest.raises(ValueError, match="from"):
        TOOLACE.calls([Call("f", {"from": 1})])
    with pytest.raises(ValueError, match="tool name"):
        TOOLACE.calls([Call("f-g")])


# --- properties ----------------------------------------------------------------------------------------------------
_WORDS = [
    "a",
    "",
    " ",
    "é",
    "中",
    "😀",
    "\n",
    "\t",
    "\\",
    '"',
    "'",
    "<",
    "{",
    "}",
    "]",
    ")",
    ";",
    "\x00",
    "\u2028",
    "\x7f",
]
_WORDS += [
    "<|im_end|>",
    "<|end|>",
    "<|eot_id|>",
    "\\<|eot_id|>",
    "</tool_call>",
    "<think>",
    "<filename>",
    "True",
    "\ud7ff",
]


def random_value(rng, depth=0):
    choice = rng.randrange(8 if depth < 3 else 5)
    if choice == 0:
        return rng.choice([None, True, False])
    if choice == 1:
        return rng.choice([0, -1, 7, 10**20, -(10**300)])
    if choice == 2:
        return rng.choice([0.0, -0.5, 1e-7, 1e300, 22.0])
    if choice in (3, 4):
        return "".join(rng.choice(_WORDS) for _ in range(rng.randrange(5)))
    if choice == 5:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {random_value(rng, 9) if rng.random() < 0.3 else f"k{i}": random_value(rng, depth + 1) for i in range(3)}


def json_keys(value):
    """Keys as JSON has them: strings only (an argument key made above may be a number)."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else f"n{key}": json_keys(item) for key, item in value.items()}
    return [json_keys(item) for item in value] if isinstance(value, list) else value


def random_calls(rng, names=("ls", "get_x", "a.b")):
    return [
        Call(rng.choice(names), {f"arg_{i}": json_keys(random_value(rng)) for i in range(rng.randrange(3))})
        for _ in range(rng.randrange(1, 4))
    ]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_rendered_calls_read_back(form):
    rng = random.Random(0)
    for _ in range(300):
        calls = random_calls(rng)
        text = form.calls(calls)
        assert not any(token in text for token in form.special_tokens)
        parsed = form.parse(text)
        assert parsed.error is None, (text, parsed.error)
        assert list(parsed.calls) == calls and parsed.content == ""
        # == takes 1 for True and 22.0 for 22; tool results do not.
        assert [repr(call.arguments) for call in parsed.calls] == [repr(call.arguments) for call in calls]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_mutated_messages_never_raise(form):
    rng = random.Random(1)
    pieces = [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name": "',
        '"arguments"',
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
    ]
    pieces += [
        '"',
        "'",
        "\\",
        ",",
        ":",
        "=",
        ";",
        "-",
        ".",
        "NaN",
        "1e999",
        "None",
        "\ud800",
        "\x00",
        "é",
        "[f(",
        "\\u",
        "not ",
    ]
    for _ in range(2000):
        text = form.calls(random_calls(rng), "")
        for _ in range(rng.randrange(1, 6)):
            at, n = rng.randrange(len(text) + 1), rng.randrange(4)
            text = rng.choice([text[:at] + rng.choice(pieces) + text[at + n :], text[:at] + text[at + n :], text[:at]])
        parsed = form.parse(text)
        if parsed.error is not None:
            assert kind(parsed) and 0 <= parsed.error.position <= len(text)
            head, tail = form.parse_error(parsed.error)
            assert head and tail
        else:
            json.dumps([call.arguments for call in parsed.calls], allow_nan=False).encode()


_HOSTILE = {
    "brackets": lambda n: "[" * n,
    "objects": lambda n: '{"a":' * n,
    "closed": lambda n: "[" * n + "]" * n,
    "minus": lambda n: "-" * n + "1",
    "not": lambda n: "not " * n + "1",
    "plus": lambda n: "1+" * n + "1",
    "dots": lambda n: "a" + ".a" * n,
    "calls": lambda n: "a" + "()" * n,
    "string": lambda n: '"' + "x" * n + '"',
    "open string": lambda n: '"' + "\\" * n,
    "digits": lambda n: "9" * n,
    "space": lambda n: " " * n,
}


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", _HOSTILE)
@pytest.mark.parametrize("n", [100, 50_000, 5_000_000])
def test_hostile_messages_cost_bounded_time(form, shape, n):
    filler = _HOSTILE[shape](n)
    start = time.perf_counter()
    for text in (
        filler,
        '<tool_call>{"name": "f", "arguments": {"a": ' + filler + "}}</tool_call>",
        '{"name": "f", "parameters": {"a": ' + filler + "}}",
        f"[f(a={filler})]",
        f"[{filler}]",
        f"[f({filler}=1)]",
        "<think>" * (len(filler) // 100) + filler,
    ):
        parsed = form.parse(text)
        if n == 5_000_000:
            assert kind(parsed) == "too_long"
        elif parsed.error is None:
            json.dumps([call.arguments for call in parsed.calls])
    assert time.perf_counter() - start < 5.0


def test_depth_is_bounded_where_the_decoder_would_still_manage():
    deep = "[" * 100 + "]" * 100
    for form, text in (
        (HERMES, tagged(f'{{"name": "f", "arguments": {{"a": {deep}}}}}')),
        (LLAMA, f'{{"name": "f", "parameters": {{"a": {deep}}}}}'),
        (TOOLACE, f"[f(a={deep})]"),
    ):
        assert kind(form.parse(text)) == "too_deep"
    assert (
        HERMES.parse(text := tagged('{"name": "f", "arguments": {"a": ' + "[" * 40 + "]" * 40 + "}}")).error is None
    ), text


def test_number_of_calls_is_bounded():
    for form in FORMATS.values():
        assert kind(form.parse(form.calls([Call("ls")] * 129))) == "too_many_calls"
        assert len(form.parse(form.calls([Call("ls")] * 128)).calls) == 128


def test_malformed_never_leaves_the_room():
    with pytest.raises(Malformed):
        normalise_arguments([1], ParseOptions())
