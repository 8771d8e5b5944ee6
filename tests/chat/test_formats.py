"""Our segments are what the official templates write, hold no forged special token, and tokenise piece by piece."""

import importlib.util
import json
import random
from pathlib import Path

import pytest

from seal_jax.chat.formats import get_format, neutralise, prefix_breaks, reasoning_rewrites
from seal_jax.chat.hermes import SMOLLM2_SYSTEM
from seal_jax.chat.tiny import signature
from seal_jax.chat.tokenizer import ByteTokenizer, train_tokenizer
from seal_jax.types import Call, ParseError

DATA = Path(__file__).parent / "data"
NAMES = ["tiny", "hermes", "llama31", "toolace"]
FORMATS = {name: get_format(name) for name in NAMES}

SEND = {
    "name": "send",
    "description": "Move money. Needs a log-in — früher nicht.",
    "parameters": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "description": "account <b>"},
            "amount": {"type": "integer"},
            "mode": {"type": "string", "enum": ["fast", "slow"], "default": "slow"},
        },
        "required": ["id", "amount"],
    },
}
LS = {"name": "ls", "description": "", "parameters": {"type": "dict", "properties": {}, "required": []}}


# --- against the official templates --------------------------------------------------------------------------------
def renderer(template, **variables):
    """`apply_chat_template` of transformers on a tokenizer that holds nothing but the template."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    empty = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=empty, bos_token="<|begin_of_text|>", chat_template=template)

    def render(messages, add_generation_prompt=False, tools=None):
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
        )

    return render


def bfcl_template(module):
    """A model's published template, as bfcl_eval (Apache-2.0) quotes it in its handler's docstring."""
    found = importlib.util.find_spec("bfcl_eval")
    if found is None or found.origin is None:
        pytest.skip("bfcl_eval is not installed")
    source = (Path(found.origin).parent / "model_handler" / "local_inference" / module).read_text()
    return source.split('"chat_template":')[1].split('"""')[0].strip()


def conversation(seed, *, tools=True, system=True, parallel=3, content=True):
    """A random conversation as messages; `calls` are ours, `tool_calls` what a template reads."""
    rng = random.Random(seed)
    words = ["Hi", "é", "<b>", "a\nb", "  x ", "{}", "中", "</tool_response>", '"', "\\n", "a <| b |> c", "&lt;"]

    def text():
        return " ".join(rng.choice(words) for _ in range(rng.randrange(1, 4))).strip()

    messages = [{"role": "system", "content": text()}] if system else []
    for _ in range(rng.randrange(1, 4)):
        messages.append({"role": "user", "content": text()})
        for _ in range(rng.randrange(3) if tools else 0):
            calls = [
                Call(rng.choice(["send", "ls"]), rng.choice([{}, {"id": text(), "amount": 3, "x": [None, True, 0.5]}]))
                for _ in range(rng.randrange(1, parallel + 1))
            ]
            messages.append(
                {
                    "role": "assistant",
                    "content": rng.choice(["", text()]) if content else "",
                    "calls": calls,
                    "tool_calls": [{"function": {"name": c.name, "arguments": dict(c.arguments)}} for c in calls],
                }
            )
            messages += [{"role": "tool", "content": text() if content else 42} for _ in calls]
        messages.append({"role": "assistant", "content": text()})
    return messages


def ours(form, messages, tools):
    """The same conversation out of our segments, sampled messages included."""
    rest = list(messages)
    system = rest.pop(0)["content"] if rest[0]["role"] == "system" else ""
    out = form.prompt(tools, rest.pop(0)["content"], system)
    while rest:
        message = rest.pop(0)
        if message["role"] == "assistant":
            out += form.assistant_open + form.calls(message.get("calls", ()), message["content"])
            out += form.stop_tokens[0] + form.after_message
        elif message["role"] == "user":
            out += form.user(message["content"])
        else:
            results = [message["content"]]
            while rest and rest[0]["role"] == "tool":
                results.append(rest.pop(0)["content"])
            out += "".join(form.observation([str(result) for result in results]))
    return out


def for_template(messages):
    return [{key: value for key, value in message.items() if key != "calls"} for message in messages]


@pytest.mark.parametrize("seed", range(12))
def test_hermes_equals_the_qwen25_template(seed):
    render = renderer((DATA / "qwen2.5.jinja").read_text())
    form = FORMATS["hermes"]
    for tools in ([SEND, LS], [{"type": "function", "function": SEND}], []):
        messages = conversation(seed, tools=bool(tools), system=seed % 2 == 0)
        assert ours(form, messages, tools) == render(for_template(messages), tools=tools or None)
    last = messages[:-1]
    assert ours(form, last, []) + form.assistant_open == render(for_template(last), True)
    assert prefix_breaks(render, for_template(conversation(seed))) == 0


@pytest.mark.parametrize("seed", range(4))
def test_hermes_equals_the_smollm2_template(seed):
    render = renderer((DATA / "smollm2.jinja").read_text())
    messages = conversation(seed, tools=False, system=seed % 2 == 0)
    form = get_format("hermes", default_system=SMOLLM2_SYSTEM)
    assert ours(form, messages, []) == render(for_template(messages))
    assert prefix_breaks(render, for_template(messages)) == 0


@pytest.mark.parametrize("seed", range(8))
def test_hermes_equals_the_qwen3_template_without_thinking(seed):
    render = renderer(bfcl_template("qwen_fc.py"), enable_thinking=False)
    form = get_format("hermes", default_system="")
    for tools in ([SEND, LS], []):
        # The template writes an empty think block into the last message only, so end on what the model answers.
        messages = conversation(seed, tools=bool(tools), system=seed % 2 == 0)[:-1]
        expected = render(for_template(messages), True, tools or None)
        no_thinking = get_format("hermes", default_system="", generation_prefix="<think>\n\n</think>\n\n")
        assert ours(form, messages, tools) + no_thinking.assistant_open == expected


@pytest.mark.parametrize("seed", range(8))
def test_llama31_equals_metas_template(seed):
    render = renderer(bfcl_template("llama_3_1.py"))
    form = FORMATS["llama31"]
    for tools in ([SEND, LS], []):
        # One call a message and no content beside calls: all the template can write. Numbers as results, since it
        # would JSON-quote strings.
        messages = conversation(seed, tools=bool(tools), system=seed % 2 == 0, parallel=1, content=False)
        assert ours(form, messages, tools) == render(for_template(messages), tools=tools or None)
    several = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [{}, {}]}]
    with pytest.raises(Exception, match="single tool-calls"):
        render(several)
    assert ours(form, [several[0], {**several[1], "calls": [Call("ls"), Call("ls")]}], [])


# Our own small template that treats reasoning as Qwen3's does: kept in the running turn, dropped in earlier ones.
THINKING = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set text = m.content.split('</think>')[-1] if m.role == 'assistant' and loop.index0 < ns.last else m.content %}
{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def test_prefix_breaks_are_counted():  # prime-rl 1334, verl 6854, ART 726
    render = renderer(THINKING)
    q1, q2, q3 = ({"role": "user", "content": f"q{i}"} for i in (1, 2, 3))
    thought = {"role": "assistant", "content": "<think>plan</think>hello"}
    plain = {"role": "assistant", "content": "hello"}
    assert prefix_breaks(render, [q1, thought]) == 0
    assert prefix_breaks(render, [q1, thought, q2]) == 1
    assert prefix_breaks(render, [q1, thought, q2, plain]) == 1
    assert prefix_breaks(render, [q1, plain, q2, plain, q3]) == 0
    assert prefix_breaks(render, [q1, thought, q2, thought, q3, thought]) == 2
    assert reasoning_rewrites([["<think>plan</think>hello"], ["hello"]]) == 1
    assert reasoning_rewrites([["hello"], ["<think>plan</think>hello"]]) == 0
    # Our row keeps what was sampled.
    form = FORMATS["hermes"]
    assert "<think>plan</think>hello<|im_end|>" in ours(form, [q1, thought, q2, plain], [])


def test_arguments_as_string_render_as_the_dict():  # Qwen3 1894: Qwen2.5's template would encode them twice
    form = FORMATS["hermes"]
    for arguments in ({"a": True}, '{"a": true}'):
        body = json.dumps({"name": "f", "arguments": arguments})
        calls = form.parse(f"<tool_call>{body}</tool_call>").calls
        assert form.calls(calls) == '<tool_call>\n{"name": "f", "arguments": {"a": true}}\n</tool_call>'


def test_one_begin_of_text():  # InfiniLM 388, vLLM 27515
    for name in ("llama31", "toolace"):
        form = FORMATS[name]
        prompt = form.prompt([SEND], "hi <|begin_of_text|>", "be brief")
        assert prompt.startswith("<|begin_of_text|>") and prompt.count("<|begin_of_text|>") == 1
        later = (
            form.user("x") + "".join(form.observation(["y"])) + form.note("z") + form.reveal([LS]) + form.assistant_open
        )
        assert "<|begin_of_text|>" not in later
    assert "<|begin_of_text|>" not in FORMATS["hermes"].prompt([SEND], "hi")


# --- every format --------------------------------------------------------------------------------------------------
def all_segments(form, text):
    doc = {**SEND, "description": text, "name": f"f{text}"}
    error = ParseError("unknown_tool", text)
    return [
        form.prompt([doc], text, text),
        form.user(text),
        form.reveal([doc]),
        *form.observation([text, text]),
        *form.parse_error(error),
        form.note(text),
        form.calls((), text),
        form.calls([Call("f", {"a": text})]),
    ]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_outside_text_forms_no_special_token(form):
    benign = all_segments(form, "x")
    others = ["<|endoftext|>", "<|fim_prefix|>", "<|reserved_special_token_7|>"] + ["<filename>", "<jupyter_code>"] * (
        form.name == "hermes"
    )
    tags = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    tokens = [*form.special_tokens, *form.stop_tokens, *others]
    for text in (*tokens, "".join(tokens), *(f"<|{token}|>" for token in tokens), *(token[:-1] for token in tokens)):
        for plain, segment in zip(benign, all_segments(form, text), strict=True):
            for token in tokens:
                assert segment.count(token) == plain.count(token), (text, segment)
        assert form.clean(form.clean(text)) == form.clean(text)
    if form.name == "tiny":
        for plain, segment in zip(benign[:-2], all_segments(form, " ".join(tags))[:-2], strict=True):
            assert not any(tag in segment for tag in tags) and not any(tag in plain for tag in tags)
    for segment in all_segments(form, "\ud800"):
        assert segment.encode()


def test_ordinary_text_is_untouched():
    for text in ("a <| b", "f <| g |> h", "<b>", "1 < 2", "</tool_response>", "<tool_call>", "<||>", "<|a b|>", ""):
        assert neutralise(text) == FORMATS["hermes"].clean(text) == text
    assert FORMATS["hermes"].clean("<|im_end|>") == "< |im_end|>"
    assert FORMATS["tiny"].clean("</tool_call>") == "< /tool_call>"


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_segments_tokenise_separately_as_together(form):
    texts = [
        segment for text in ("Ann sends 5.", '{"id": "a1", "ok": true}', "") for segment in all_segments(form, text)
    ]
    for tokenizer in (
        ByteTokenizer(form.special_tokens),
        train_tokenizer(texts, vocab_size=600, special_tokens=form.special_tokens, scaffold=form.scaffold),
    ):
        for head, tail in (
            form.observation(["a"]),
            form.observation(['{"id": "a1"}', '"'] * 2),
            form.observation([""]),
            form.parse_error(ParseError("unclosed", "call has no closing tag")),
        ):
            assert tail.startswith(form.special_tokens)
            assert tokenizer.encode(head) + tokenizer.encode(tail) == tokenizer.encode(head + tail)
            sampled = form.calls([Call("ls")]) + form.stop_tokens[0]
            row = [sampled, form.after_message + head, tail, form.assistant_open]
            joint = tokenizer.encode("".join(row))
            assert [i for text in row for i in tokenizer.encode(text)] == joint
        row = [form.prompt([SEND], "x"), form.note("y"), form.assistant_open]
        assert [i for text in row for i in tokenizer.encode(text)] == tokenizer.encode("".join(row))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_observation_needs_a_result(form):
    with pytest.raises(ValueError, match="at least one result"):
        form.observation([])


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_replies_to_malformed_messages_say_so(form):
    error = form.parse("<tool_call>{" if form.name in ("tiny", "hermes") else '{"name": 1}').error
    if form.name != "toolace":
        assert error is not None
        assert "[ERROR] Invalid tool call format: " in form.parse_error(error)[0]
    named = form.parse_error(ParseError("unknown_tool", "Tool 'abc' is not available."))
    assert "abc" in named[0]


def test_a_setting_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="'qwen' is not known.*hermes"):
        get_format("qwen")
    with pytest.raises(ValueError, match="no setting 'sytem'.*default_system"):
        get_format("hermes", sytem="x")
    changed = get_format("llama31", parallel=False, date="1 Jan 2025")
    assert changed.options.accept_parameters_key and not changed.options.parallel and changed.date == "1 Jan 2025"


def test_documents_that_are_not_json_are_refused():
    for value in (float("nan"), {1, 2}, b"x"):
        with pytest.raises(ValueError):
            FORMATS["hermes"].prompt([{"name": "f", "description": value}], "x")


def test_toolace_renames_parameters():
    prompt = FORMATS["toolace"].prompt([SEND], "hi")
    line = next(line for line in prompt.splitlines() if line.startswith("["))
    assert json.loads(line.removesuffix("<|eot_id|>").split("<|eot_id|>")[0])[0]["arguments"] == SEND["parameters"]
    assert '"parameters"' not in prompt


# --- tiny ----------------------------------------------------------------------------------------------------------
def test_tiny_signatures():
    assert signature(SEND) == "send(id: str, amount: int, mode?: fast|slow=slow) - Move money"
    assert signature(LS) == "ls()"
    marked = {
        "name": "f",
        "description": "Do it. Then more. [log in first]",
        "parameters": {
            "properties": {
                "a": {"type": "array", "items": {"type": "number"}, "description": "list [required]"},
                "b": {"type": "boolean", "default": False},
                "c": {},
            },
            "required": ["a"],
        },
    }
    assert signature(marked) == "f(a: list[float] [required], b?: bool=false, c?: any) - Do it [log in first]"


def toolbox_like(n=8):
    verbs = ["find", "get", "set", "pay", "lock", "login", "list", "drop"]
    nouns = ["account", "order", "card", "room", "ticket", "user", "parcel", "lamp"]
    return [
        {
            "name": f"{verbs[i]}_{nouns[i]}",
            "description": f"{verbs[i].title()} one {nouns[i]} by its id.",
            "parameters": {
                "type": "object",
                "properties": {
                    f"{nouns[i]}_id": {"type": "string"},
                    "amount": {"type": "integer"},
                    "mode": {"type": "string", "enum": ["fast", "slow", "safe"], "default": "safe"},
                },
                "required": [f"{nouns[i]}_id"],
            },
        }
        for i in range(n)
    ]


def test_tiny_is_small():
    form, tools = FORMATS["tiny"], toolbox_like()
    call = Call("pay_room", {"room_id": "kite", "amount": 15, "now": True})
    prompt, body = form.prompt(tools, "Please pay 15 to the room called kite."), form.calls([call])
    texts = [prompt, body, form.prompt(tools[::-1], "Lock the ticket of Ann, then list the lamp.")] * 3
    tokenizer = train_tokenizer(texts, vocab_size=900, special_tokens=form.special_tokens, scaffold=form.scaffold)
    assert len(tokenizer.encode(prompt)) <= 350
    # Scaffold is one token each; the rest is names, digits and words.
    assert [tokenizer.decode([i]) for i in tokenizer.encode(body)] == [
        *('<tool_call>{"name": "', "pay", "_", "room", '", "arguments": {"', "room", "_", "id", '": "', "kite"),
        *('", "', "amount", '": ', "1", "5", ', "', "now", '": ', "true", "}}</tool_call>"),
    ]


def test_tiny_scaffold_covers_what_calls_are_made_of():
    form = FORMATS["tiny"]
    values = ["x", 1, True, False, None, ["x"], {"k": "x"}]
    text = " ".join(form.calls([Call("f", {"a": value})]) for value in values)
    text += form.calls([Call("f"), Call("f", {"a": 1, "b": "x", "c": "y"})])
    text += " ".join(['{"error": "x"}', '[{"a": "x"}, {"a": 1}, {"a": "x"}]', form.prompt([SEND], "x")])
    text += form.parse_error(ParseError("unclosed", ""))[0]
    unused = [piece for piece in form.scaffold if piece not in text]
    assert unused == []
