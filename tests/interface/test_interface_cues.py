"""What Ω says: every cue's text, when it is silent, and that nothing but docs and the error's class can be in it."""

import copy
import json

import pytest

from seal_jax.interface import BARE, Interface, InterfaceSettings, full, initial
from seal_jax.interface.arguments import allowed_values, value_format
from seal_jax.interface.cues import FEEDBACK, GUIDELINES, LABEL_OF_ERROR
from seal_jax.types import FAILURE_LABELS, Call, CallResult, ParseError


def tool(name, required=(), **properties):
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"name": name, "description": f"{name} it", "parameters": parameters}


SEND = tool(
    "send",
    ["to", "amount"],
    to={"type": "string", "description": "who gets it"},
    amount={"type": "integer"},
    mode={"type": "string", "enum": ["fast", "slow"]},
    memo={"type": "string"},
)
LIGHT = tool("light", ["mode"], mode={"type": "string", "description": 'The mode. [Enum]: ["on", "off", "auto"]'})
BOOK = tool("book", [], day={"type": "string", "description": "The day in the format YYYY-MM-DD."})
PING = tool("ping")
TOOLS = (SEND, LIGHT, BOOK, PING)


def showing(*labels, **settings):
    return Interface(active=labels, settings=InterfaceSettings(**settings))


def err(kind, name="send", detail="", text="Error during execution: boom"):
    return CallResult(Call(name, {"amount": 4711, "to": "Zoe"}), text, kind, detail)


# --- bare -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("interface", [BARE, initial(InterfaceSettings()), showing(*FAILURE_LABELS, components=())])
def test_bare_adds_nothing(interface):
    assert interface.note(TOOLS) == ""
    assert interface.inline(TOOLS) == TOOLS
    assert all(a is b for a, b in zip(interface.inline(TOOLS), TOOLS, strict=True))
    for kind in FEEDBACK:
        if kind != "parse":
            assert interface.feedback(err(kind), TOOLS) == ""
    assert interface.feedback(ParseError("bad_json", "why"), TOOLS) == ""


def test_no_tools():
    assert full(InterfaceSettings()).inline(()) == ()
    assert "only these tools: none." in full(InterfaceSettings()).note(())


# --- φ_cap ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("label", [x for x in GUIDELINES if x != "invalid_tool_call"])
def test_a_guideline_is_one_short_constant_line(label):
    text = showing(label).note(TOOLS)
    assert text == showing(label).note((PING,))
    assert text.startswith("[hint] ") and "\n" not in text
    assert len(text.split()) <= 14


def test_format_reminder_names_the_tools():
    assert "send, light, book, ping" in showing("invalid_tool_call").note(TOOLS)
    assert "send, light, and others." in showing("invalid_tool_call", max_tools=2).note(TOOLS)


def test_recovery_needs_no_note():
    assert showing("recovery_failure").note(TOOLS) == ""


def test_components_switch_parts_off():
    assert showing(*FAILURE_LABELS, components=("schema",)).note(TOOLS).count("[hint]") == 3
    assert showing(*FAILURE_LABELS, components=("cap",)).note(TOOLS).count("[hint]") == len(GUIDELINES)
    assert showing(*FAILURE_LABELS, components=("err",)).note(TOOLS) == ""


# --- φ_schema ---------------------------------------------------------------------------------------------------------
def test_schema_lines():
    assert showing("argument_mismatch").note(TOOLS).splitlines() == [
        "[hint] send: to str, amount int, mode? fast|slow.",
        "[hint] light: mode on|off|auto.",
        "[hint] book: day? YYYY-MM-DD.",
    ]


def test_schema_parts_and_limit():
    lines = showing("argument_mismatch", schema_parts=("values",), max_tools=1).note(TOOLS).splitlines()
    assert lines == ["[hint] send: mode fast|slow.", "[hint] for the other tools see their docs."]


def test_inline_writes_into_copies():
    before = copy.deepcopy(TOOLS)
    interface = showing("argument_mismatch", placement="inline")
    send, light, book, ping = interface.inline(TOOLS)
    assert before == TOOLS
    assert send["parameters"]["properties"]["to"]["description"] == "who gets it [required] [type: str]"
    assert send["parameters"]["properties"]["mode"]["description"] == "[type: str] [one of: fast|slow]"
    assert "[one of: on|off|auto]" in light["parameters"]["properties"]["mode"]["description"]
    assert "[format: YYYY-MM-DD]" in book["parameters"]["properties"]["day"]["description"]
    assert ping is PING
    assert interface.note(TOOLS) == ""
    assert [d["parameters"]["required"] for d in interface.inline(TOOLS)] == [
        d["parameters"]["required"] for d in TOOLS
    ]


def test_inline_leaves_guidelines_in_the_note():
    interface = showing("argument_mismatch", "spurious_tool_call", placement="inline")
    assert interface.note(TOOLS) == showing("spurious_tool_call").note(TOOLS)


def test_note_placement_leaves_the_docs():
    assert showing("argument_mismatch").inline(TOOLS) == TOOLS


@pytest.mark.parametrize(
    "prop, values",
    [
        ({"enum": ["a", "b"]}, ("a", "b")),
        ({"enum": [1, 2, None]}, ("1", "2", "null")),
        ({"type": "array", "items": {"enum": ["x", "y"]}}, ("x", "y")),
        ({"description": 'The mode to set. [Enum]: ["engage", "release"]'}, ("engage", "release")),
        ({"description": "The currency. [Enum]: USD, RMB, EUR"}, ("USD", "RMB", "EUR")),
        ({"description": "[Enum]: Sunset Valley, New York"}, ("Sunset Valley", "New York")),
        ({"description": "Possible values: low, high. Used later."}, ("low", "high")),
        ({"description": "Allowed values are 'a', 'b' or 'c'"}, ("a", "b", "c")),
        ({"description": "Must be one of: red, green, or blue"}, ("red", "green", "blue")),
        ({"description": "One of the two accounts, whichever is newer, as told"}, ()),
        ({"description": "[Enum]: []"}, ()),
        ({"description": "The user's name"}, ()),
        ({}, ()),
    ],
)
def test_allowed_values_from_enum_and_from_prose(prop, values):
    assert allowed_values(prop) == values


@pytest.mark.parametrize(
    "prop, form",
    [
        ({"description": "Start date (format: 'YYYY-MM-DD')."}, "YYYY-MM-DD"),
        ({"description": "in the format MM/YYYY"}, "MM/YYYY"),
        ({"description": "Return in the format of YYYY-MM-DDTHH:MM:SS."}, "YYYY-MM-DDTHH:MM:SS"),
        ({"description": "in human-readable format (e.g., KB, MB)"}, ""),
        ({"description": "in the format of street, city, state."}, '"street, city, state"'),
        ({"description": "The format of the file name, an old one, is free"}, ""),
        ({"format": "date"}, "date"),
        ({"type": "float", "format": "float"}, ""),
        ({"format": 5}, ""),
    ],
)
def test_format_from_key_and_from_prose(prop, form):
    assert value_format(prop) == form


# --- revealed tools ---------------------------------------------------------------------------------------------------
def test_revealed_tools_get_cues():
    interface = full(InterfaceSettings())
    later = interface.note((LIGHT,), revealed=True)
    assert "light: mode on|off|auto" in later
    assert "only these tools: light" in later
    assert GUIDELINES["state_mismatch"] not in later
    assert GUIDELINES["state_mismatch"] in interface.note((LIGHT,))
    assert "no such tool; use one of: send, light" in interface.feedback(err("unknown_tool"), (SEND, LIGHT))


# --- φ_err ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "error, label, text",
    [
        (ParseError("bad_json", "x"), "invalid_tool_call", "[hint] malformed: fix the format, then resend."),
        (
            ParseError("unknown_tool", "x"),
            "invalid_tool_call",
            "[hint] no such tool; use one of: send, light, book, ping.",
        ),
        (
            ParseError("unavailable_tool", "x"),
            "invalid_tool_call",
            "[hint] not offered now; use one of: send, light, book, ping, or call nothing.",
        ),
        (err("unknown_tool"), "invalid_tool_call", "[hint] no such tool; use one of: send, light, book, ping."),
        (err("missing_argument", detail="to"), "argument_mismatch", "[hint] missing argument to (str); add it."),
        (
            err("missing_argument", detail="mode"),
            "argument_mismatch",
            "[hint] missing argument mode (fast|slow); add it.",
        ),
        (err("unexpected_argument", detail="sum"), "argument_mismatch", "[hint] unexpected argument sum; drop it."),
        (err("argument_type", detail="amount"), "argument_mismatch", "[hint] wrong argument amount (int); fix it."),
        (
            err("argument_type", "light", "mode"),
            "argument_mismatch",
            "[hint] wrong argument mode (on|off|auto); fix it.",
        ),
        (err("argument_type"), "argument_mismatch", "[hint] wrong argument; fix it."),
        (
            err("tool_error", text='{"error": "a1 is frozen"}'),
            "recovery_failure",
            "[hint] refused: fix the cause, then retry.",
        ),
        (err("tool_error", text="[{'error': 'a1'}]"), "recovery_failure", "[hint] refused: fix the cause, then retry."),
        (err("exception"), "recovery_failure", "[hint] failed: check the arguments, then retry."),
        (err("time_limit"), "recovery_failure", "[hint] too slow: ask for less."),
        (err("size_limit"), "recovery_failure", "[hint] result too long: ask for less."),
    ],
)
def test_feedback(error, label, text):
    """Also for plain-text exceptions, which the released code's hints never matched."""
    assert showing(label).feedback(error, TOOLS) == text
    others = [x for x in FAILURE_LABELS if x != label]
    assert showing(*others).feedback(error, TOOLS) == ""
    assert showing(label, components=("schema", "cap")).feedback(error, TOOLS) == ""


@pytest.mark.parametrize("error", ["none", "env_error"])
def test_no_feedback_when_the_policy_did_nothing_wrong(error):
    assert full(InterfaceSettings()).feedback(err(error), TOOLS) == ""


def test_every_error_kind_has_a_text_and_a_label():
    from typing import get_args

    from seal_jax.types import ErrorKind

    assert set(FEEDBACK) == set(LABEL_OF_ERROR) == {*get_args(ErrorKind), "parse"} - {"none", "env_error"}


# --- the log and the way to JSON --------------------------------------------------------------------------------------
def test_describe_is_json_with_texts():
    log = json.loads(json.dumps(full(InterfaceSettings(placement="inline")).describe()))
    assert [x["label"] for x in log["active"]] == list(FAILURE_LABELS)
    assert all(x["reason"] == "given" for x in log["active"])
    assert "refused: fix the cause, then retry." in str(log) and "log in first" not in str(log)
    assert "log in first" in str(full(InterfaceSettings(feedback="classed")).describe())


def test_json_round_trip():
    interface = Interface(
        active=("recovery_failure", "spurious_tool_call"),
        settings=InterfaceSettings(activate={"recovery_failure": 0.2}, pinned=("spurious_tool_call",), max_cues=0),
        round=7,
        ages=(3, 1),
        rates={"recovery_failure": 0.25},
        retired=("missing_tool_call",),
    )
    assert Interface.from_dict(json.loads(json.dumps(interface.to_dict()))) == interface
    assert Interface.from_dict(json.loads(json.dumps(BARE.to_dict()))) == BARE


def test_bad_states_are_refused():
    with pytest.raises(ValueError, match="'pass'"):
        Interface(active=("pass",))
    with pytest.raises(ValueError, match="2 active cues but 1 ages"):
        Interface(active=("recovery_failure", "missing_tool_call"), ages=(1,))
    with pytest.raises(ValueError, match="'ages'"):
        Interface.from_dict({"active": [], "settings": {}, "round": 0})
