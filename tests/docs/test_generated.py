"""Test that the parts of the reference pages that come from the code are current, and that none is missing."""

import re

import pytest

from django_faktory.management.cli.subcommands import subcommands
from scripts import reference
from tests.docs.pages import DOCS, ROOT, name

pytestmark = [pytest.mark.linted, pytest.mark.core]

PAGES = sorted((DOCS / "reference").glob("*.md"))
COMMANDS = [path.stem for path in (ROOT / "django_faktory" / "management" / "commands").glob("[a-z]*.py")]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_is_current(page):
    text = page.read_text(encoding="utf-8")
    assert reference.fill(text) == text, "run: make docs"


def test_each_part_is_on_exactly_one_page():
    parts = [part[0] for page in PAGES for part in reference.PART.findall(page.read_text(encoding="utf-8"))]
    tags = {one["tags"][0] for methods in reference.openapi()["paths"].values() for one in methods.values()}
    of_commands = {*COMMANDS, *subcommands()} - {"faktory"}  # whose arguments are its subcommands
    expected = {f"command {word}" for word in of_commands} | {f"operations {tag}" for tag in tags}
    expected |= reference.RENDERERS.keys() - {"command", "operations"}
    assert sorted(parts) == sorted(expected)


def test_a_part_that_is_not_current_is_written_again():
    text = "# Page\n\n<!-- make docs: exit-codes -->\n\nold\n\n<!-- end -->\n\nmore\n"
    filled = reference.fill(text)
    assert re.search(r"exit-codes -->\n\n\| exit code \|.*\n\n<!-- end -->\n\nmore\n$", filled, flags=re.DOTALL)
    assert "old" not in filled
