"""Test that a reader gets through the documentation: no page and not all of it is too long. Code is not counted."""

import re

import pytest

from tests.docs.pages import DOCS, name, text_of, without_fences

pytestmark = pytest.mark.core

MAX_PAGE, MAX_SPEED, MAX_ALL = 2_000, 600, 40_000
"""Words; the reference, in which readers look things up, and the design decisions are not limited."""


def words():
    """Return the number of words of each page that is read from top to bottom."""
    pages = [page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0] not in ("reference", "adr")]
    texts = {name(page): without_fences(page.read_text(encoding="utf-8")) for page in pages}
    return {path: sum(bool(re.search(r"\w", word)) for word in text.split()) for path, text in texts.items()}


def test_no_page_is_too_long():
    assert {path: count for path, count in words().items() if count > MAX_PAGE} == {}


def test_the_page_about_speed_is_one_table_with_a_short_text():
    assert words()["docs/performance.md"] <= MAX_SPEED
    assert text_of("performance.md").count("\n|---") == 1


def test_all_pages_together_are_not_too_long():
    assert sum(words().values()) <= MAX_ALL
