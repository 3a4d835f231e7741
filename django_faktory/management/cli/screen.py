"""Output of a subcommand: a table for a terminal, aligned text for a pipe, or one JSON document.

Text from clients never reaches a terminal unchanged: `clean` spells out control and bidirectional characters.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Protocol

from ...operations.serializers import encode_document
from .table import LONGEST_CELL, Column, join, lay_out

_COLOURS = {
    "dead": "red",
    "retries": "yellow",
    "working": "cyan",
    "succeeded": "green",
    "paused": "yellow",
    "quiet": "yellow",
    "terminate": "red",
}


class Stream(Protocol):
    """The part of Django's OutputWrapper that is used here."""

    def write(self, msg: str = "", /) -> Any:
        """Write a line of output."""

    def isatty(self) -> bool:
        """Return whether the output is a terminal."""


def clean(text: object, *, longest: int | None = None) -> str:
    """Return text as one line; control characters, escapes and bidirectional marks are spelled out."""
    printable = "".join(char if char.isprintable() else _escape(char) for char in str(text))
    return f"{printable[: longest - 1]}…" if longest and len(printable) > longest else printable


def _escape(char: str) -> str:
    # As in a Python literal, without its quotes: readable in a log, and a terminal does not interpret it.
    return ascii(char)[1:-1]


def has_rich() -> bool:
    """Return whether rich, which draws tables, is installed. It is an extra: servers need no terminal output."""
    try:
        import rich  # noqa: F401  (an extra)
    except ImportError:
        return False
    return True


class Screen:
    """Destination of a subcommand's output."""

    def __init__(self, out: Stream, err: Stream, *, is_json: bool) -> None:
        self.out, self.err, self.is_json = out, err, is_json
        is_terminal = not is_json and out.isatty()
        self.is_drawn = is_terminal and has_rich()
        self.width = shutil.get_terminal_size().columns if is_terminal else None
        """Width of the terminal; None if the output is none."""

    def json(self, document: Mapping[str, Any]) -> None:
        """Write one document on one line, in ASCII, so that sequences that a terminal would interpret are escaped."""
        self.out.write(encode_document(document))

    def line(self, text: str) -> None:
        self.out.write(clean(text))

    def note(self, text: str) -> None:
        """Write a remark to stderr, separate from the result."""
        self.err.write(clean(text))

    def result(self, document: Mapping[str, Any], text: str) -> None:
        """Write the JSON document if it was requested, else the line of text."""
        if self.is_json:
            self.json(document)
        else:
            self.line(text)

    def listing(
        self,
        document: Mapping[str, Any],
        columns: Sequence[Column],
        rows: Iterable[Any],
        *,
        if_more: str = "use --limit for more",
    ) -> None:
        """Write the JSON document if it was requested, else the table; add `if_more` if the document `is_more`."""
        if self.is_json:
            self.json(document)
            return
        self.table(columns, rows)
        if document.get("is_more"):
            self.note(if_more)

    def table(self, columns: Sequence[Column], rows: Iterable[Any], *, title: str = "") -> None:
        """Write rows under column heads: as wide as the terminal, else in full; in colours if rich is installed."""
        table = lay_out(columns, clean_cells(columns, rows), width=self.width)
        if self.is_drawn:
            self.draw(build_rich_text(table, title=title))
            return
        if title:
            self.out.write(title)
        for row in table:
            self.out.write(join(row))

    def pairs(self, values: Mapping[str, object]) -> None:
        """Write one name and value per line; further lines of a value are indented."""
        width = max(map(len, values), default=0)
        for name, value in values.items():
            first_line, *further_lines = str("–" if value in (None, "") else value).split("\n")
            self.out.write(f"{clean(name):<{width}}  {clean(first_line)}")
            for line in further_lines:
                self.out.write(f"{'':<{width}}  {clean(line)}")

    def draw(self, renderable: Any) -> None:
        """Write a renderable of rich; no line is wrapped."""
        from rich.console import Console  # an extra

        # Rendered to a string first: rich would write to its own stream and skip Django's OutputWrapper.
        text = io.StringIO()
        Console(file=text, force_terminal=True, highlight=False, markup=False).print(renderable, soft_wrap=True)
        self.out.write(text.getvalue().rstrip("\n"))

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int], object]]:
        """Yield a function to call with the number of items done.

        It draws a progress bar on a terminal, if there are more than 1,000 items.
        """
        if not self.is_drawn or not self.err.isatty() or total <= 1000:
            yield lambda _: None
            return
        from rich.console import Console  # an extra
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        # On stderr, so that stdout has the result only.
        with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=total)
            yield lambda count: bar.advance(task, count)

    def confirm(self, question: str) -> bool:
        """Ask for confirmation. Returns False if stdin is not a terminal."""
        # A pipe or a scheduled script cannot answer: without --yes nothing is done.
        if not sys.stdin.isatty():
            return False
        # On stderr: stdout may be a file or a pipe while the terminal still answers.
        self.err.write(f"{clean(question)} [y/N] ")
        return sys.stdin.readline().strip().lower() in ("y", "yes")


def quantity(count: int | None, noun: str) -> str:
    """Return a number with its noun: `1 job`, `2 jobs`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def span(seconds: float) -> str:
    """Return a length of time in its largest unit: `0.5 s`, `22 min`, `3.1 h`, `2.5 d`."""
    for unit, size in (("d", 86_400), ("h", 3600)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{max(seconds, 0):.1f} s"


def age(moment: str | None) -> str:
    """Return how long ago a time of a JSON document was, or in how long it will be; "" for none."""
    if moment is None:
        return ""
    seconds = (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
    return f"{span(seconds)} ago" if seconds >= 0 else f"in {span(-seconds)}"


def age_of(member: str) -> Callable[[Any], str]:
    """Return a function that formats a time of a row by `age`."""
    return lambda row: age(row[member])


def clean_cells(columns: Sequence[Column], rows: Iterable[Any]) -> list[list[str]]:
    """Return the rows as printable texts; long ones are cut, except names."""
    return [
        [
            clean("–" if cell in (None, "") else cell, longest=None if column.is_name else LONGEST_CELL)
            for column in columns
            for cell in (column.read_cell(row),)
        ]
        for row in rows
    ]


def build_rich_text(rows: Sequence[Sequence[str]], *, title: str = "") -> Any:
    """Return a table that is laid out as a text of rich, with colours for states."""
    from rich.text import Text  # an extra

    text = Text(no_wrap=True, overflow="ignore")
    if title:
        text.append(f"{title}\n", style="italic")
    for place, row in enumerate(rows):
        # Without `markup`: a cell may contain brackets.
        cells = [Text(cell, style=_COLOURS.get(cell.strip(), "") if place else "bold") for cell in row]
        line = Text("  ").join(cells)
        line.rstrip()
        text.append_text(line).append("\n")
    return text
