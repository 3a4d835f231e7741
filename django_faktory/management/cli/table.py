"""Lay out a table for people: the columns fit into the terminal; names that other commands take stay whole. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unicodedata import east_asian_width

# A client may store texts of any length: one of them must not make a table unreadable.
LONGEST_CELL = 80
_GAP = 2
_NARROW = 16
"""Characters to which a cell may be cut before a column is left out."""


class Column(NamedTuple):
    """A column: its head, and what happens to it if the terminal is narrow."""

    head: str
    read: str | int | Callable[[Any], object] = 0
    """Its member of a row, or a function of the row."""
    rank: int = 0
    """The columns of the highest rank are left out first; those of rank 0 never."""
    is_name: bool = False
    """Its cells are names that other commands take, such as jids; they are never cut."""
    keeps_end: bool = False
    """Its cells are dotted names, whose last part says most: they are cut at the beginning."""

    def read_cell(self, row: Any) -> object:
        return self.read(row) if callable(self.read) else row[self.read]


def lay_out(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, width: int | None = None) -> list[list[str]]:
    """Return the heads and the rows as cells of equal width, for columns `_GAP` apart; without a width nothing is cut.

    A name longer than LONGEST_CELL moves only its own row.
    """
    table = [[column.head for column in columns], *rows]
    natural = [
        max(size for cell in cells if (size := _size(cell)) <= LONGEST_CELL or not column.is_name)
        for column, cells in zip(columns, zip(*table, strict=True), strict=True)
    ]
    widths = dict(enumerate(natural)) if width is None else _fit(columns, natural, width)
    return [[_pad(columns[place], row[place], widths[place]) for place in sorted(widths)] for row in table]


def join(cells: Sequence[str]) -> str:
    return (" " * _GAP).join(cells).rstrip()


def _fit(columns: Sequence[Column], natural: Sequence[int], width: int) -> dict[int, int]:
    """Return the width of each column that is shown, by its place."""
    by_rank = sorted(range(len(columns)), key=lambda place: columns[place].rank)
    widths: dict[int, int] = {}
    left = width + _GAP
    for place in by_rank:
        least = natural[place] if columns[place].is_name else min(natural[place], _NARROW)
        if columns[place].rank == 0 or least + _GAP <= left:
            widths[place], left = least, left - least - _GAP
    # The rest is shared: one character for each column that is cut, until nothing is left.
    while left > 0 and (cut := [place for place in by_rank if widths.get(place, natural[place]) < natural[place]]):
        for place in cut[:left]:
            widths[place] += 1
        left -= len(cut)
    return widths


def _pad(column: Column, cell: str, width: int) -> str:
    if not column.is_name and _size(cell) > width:
        while _size(cell) >= width:
            cell = cell[1:] if column.keeps_end else cell[:-1]
        cell = f"…{cell}" if column.keeps_end else f"{cell}…"
    return cell + " " * (width - _size(cell))


def _size(text: str) -> int:
    """Return the columns of a terminal that a text takes."""
    return len(text) if text.isascii() else len(text) + sum(east_asian_width(char) in "WF" for char in text)
