"""Finds the pinned bfcl-eval wheel: its data files and its tool classes, without importing its heavy modules.

The wheel is pinned because its questions, answers and tool behaviour change between releases, and scores with them.
It is installed with --no-deps because its own pins (numpy among them) conflict with jax's; the eight tool classes need
the standard library and mpmath only.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

VERSION = "2026.3.23"
INSTALL = f"pip install --no-deps bfcl-eval=={VERSION}"

#: The tool classes of the multi-turn tasks and the module (also the name of the file of docs) that holds each.
CLASS_MODULES = {
    "GorillaFileSystem": ("gorilla_file_system", "gorilla_file_system"),
    "MathAPI": ("math_api", "math_api"),
    "MessageAPI": ("message_api", "message_api"),
    "TwitterAPI": ("posting_api", "posting_api"),
    "TicketAPI": ("ticket_api", "ticket_api"),
    "TradingBot": ("trading_bot", "trading_bot"),
    "TravelAPI": ("travel_booking", "travel_booking"),
    "VehicleControlAPI": ("vehicle_control", "vehicle_control"),
}


def package_folder() -> Path:
    """The folder of the installed package; ImportError with the line to run if it is missing or another version."""
    try:
        version = importlib.metadata.version("bfcl-eval")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"suite 'bfcl' needs the package bfcl-eval, which is not installed; run: {INSTALL}") from None
    if version != VERSION:
        raise ImportError(
            f"suite 'bfcl' needs bfcl-eval {VERSION}, but {version} is installed, whose tasks or tools may differ; "
            f"run: {INSTALL}"
        )
    spec = importlib.util.find_spec("bfcl_eval")  # finds, does not import
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"bfcl-eval {version} is registered but its files are missing; run: {INSTALL}")
    return Path(next(iter(spec.submodule_search_locations)))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def tool_class(name: str) -> type:
    """One of the package's tool classes."""
    module = f"bfcl_eval.eval_checker.multi_turn_eval.func_source_code.{CLASS_MODULES[name][0]}"
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"BFCL's {name} needs the module {error.name!r}; run: pip install -e . && {INSTALL}"
        ) from error


def prompting_system_prompt() -> str:
    """The system prompt of models that the package prompts for Python call lists; `{functions}` stands for the docs."""
    texts = importlib.import_module("bfcl_eval.constants.default_prompts")
    style = texts.PROMPT_STYLE_TEMPLATES["classic"]
    return texts.PROMPT_TEMPLATE_MAPPING["plaintext"].format(
        persona=style["persona"],
        task=style["task"],
        tool_call_format=style["tool_call_no_tag"].format(
            output_format=texts.OUTPUT_FORMAT_MAPPING["python"], param_types=texts.PARAM_TYPE_MAPPING["python"]
        ),
        multiturn_behavior=style["multiturn_behavior"],
        available_tools=style["available_tools"].format(format="json", functions="{functions}"),
    )


def language_hint(folder: Path) -> str:
    """The sentence that the official generation script appends to the description of every offered function.

    Read from the package's source, because importing the module that holds it creates folders in site-packages.
    """
    tree = ast.parse((folder / "utils.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "_get_language_specific_hint":
            hints = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and "Python" in str(n.value)]
            if len(hints) == 1:
                return str(hints[0])
    raise ValueError(f"{folder / 'utils.py'}: the Python language hint was not found; set language_hint=False")
