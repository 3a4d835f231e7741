"""Test output to a terminal: aligned or drawn, and without control characters that a client wrote."""

import pytest

from django_faktory.management.cli.screen import Screen, clean
from django_faktory.management.cli.table import Column, join, lay_out
from tests.management.cli.conftest import Terminal

pytestmark = pytest.mark.once

HOSTILE = [
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\",
    "\x9b2J",
    "a\rb",
    "a\nb",
    "a\bb",
    "\u202egnp.exe",
    "\u2066x\u2069",
    "a\u2028b",
    "[bold red]x[/]",
    "[link=http://evil]x[/link]",
    ":smile:",
    "\x7f",
    "x" * 5000,
    "e\u200b",
]
COMMANDING = {chr(code) for code in (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))}


@pytest.mark.core
@pytest.mark.parametrize("text", HOSTILE)
def test_a_cleaned_text_is_one_printable_line(text):
    cleaned = clean(text)
    assert cleaned.isprintable()
    assert len(clean(text, longest=80)) <= 80


@pytest.mark.core
def test_control_characters_are_shown_as_escape_sequences():
    assert clean("a\x1b[31m\u202eb") == "a\\x1b[31m\\u202eb"


@pytest.mark.core
def test_columns_are_aligned_and_a_long_name_moves_only_its_own_row():
    columns = (Column("A", is_name=True), Column("BB"))
    rows = lay_out(columns, [["long", "x"], ["é€", "x"], ["日本", "x"], ["n" * 99, "x"]])
    assert [join(row) for row in rows] == ["A     BB", "long  x", "é€    x", "日本  x", f"{'n' * 99}  x"]


@pytest.mark.core
def test_a_table_fits_into_each_width_that_its_names_leave():
    columns = (
        Column("ID", is_name=True),
        Column("TASK", 0, 1, keeps_end=True),
        Column("TEXT", 0, 2),
        Column("RARE", 0, 3),
    )
    cells = ["i" * 36, "shop.tasks.charge_the_card", "日本" * 20, "rare"]
    for width in range(1, 160):
        heads, row = lay_out(columns, [cells], width=width)
        assert [cell.strip() for cell in heads if cell.strip() not in ("ID", "TASK", "TEXT", "RARE")] == []
        assert row[0] == cells[0]
        line = join(row)
        assert len(line) + line.count("日") + line.count("本") <= max(width, 36)
        if width >= 36 + 2 + 16:
            assert row[1].strip().endswith("charge_the_card")
    assert [cell.strip() for cell in row] == cells


@pytest.mark.core
def test_markup_in_a_table_cell_is_shown_literally():
    out = Terminal()
    screen = Screen(out, Terminal(), is_json=False)
    assert screen.is_drawn
    screen.table((Column("TASK"),), [["[bold red]x[/] :smile:"]])
    assert "[bold red]x[/] :smile:" in out.getvalue()


@pytest.mark.django_db
@pytest.mark.parametrize("text", HOSTILE)
def test_no_answer_to_a_hostile_argument_contains_control_characters(faktory, text):
    for words in [("jobs", text), ("pause", text), ("batches", text), ("push", text, text), ("job", text)]:
        answer = faktory(*words)
        assert COMMANDING & set(answer.out + answer.err) <= {"\n"}
