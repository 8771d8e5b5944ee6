"""docs/diagnosis.md shows every label and every tag, in the priority and the mapping that the code has."""

import re
from pathlib import Path

import pytest

from seal_jax.diagnosis import RELEASE_TAGS, TAG_TO_LABEL
from seal_jax.diagnosis.rules import _RULES
from seal_jax.types import LABELS

PAGE = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("label", LABELS)
def test_every_label_has_its_row(label):
    assert sum(row[0] == f"`{label}`" for row in ROWS) == 1


def test_the_priorities_are_those_of_the_rules():
    ranked = sorted((row[1], row[0].strip("`")) for row in ROWS if re.fullmatch(r"\d", row[1]))
    assert [label for _, label in ranked] == [label for label, _ in _RULES]


@pytest.mark.parametrize("tag", RELEASE_TAGS)
def test_every_release_tag_stands_beside_its_label(tag):
    assert [row[2] for row in ROWS if len(row) == 4 and row[1] == f"`{tag}`"] == [f"`{TAG_TO_LABEL[tag]}`"]


def test_the_readme_points_to_the_page():
    assert "docs/diagnosis.md" in (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
