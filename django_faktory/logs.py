"""Loggers whose records cannot be forged: what clients, peers and tasks wrote stays inside the record it is told in.

Knows the standard library only. A name or a message with a line break would otherwise begin a line of its own in a log
file, and look like a record; an escape sequence would command the terminal of who reads it.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any

MARGIN = "    | "
"""Begins each further line of a record that has several: no record begins like that."""


def get_logger(name: str) -> logging.Logger:
    """The logger of this name, for `__name__`: arguments and tracebacks are made harmless before any handler."""
    found = logging.getLogger(name)
    found.addFilter(_in_place)  # the same function each time: it is added once
    return found


class Lines:
    """An argument that has several lines on purpose: they are shown below the record, each behind the margin."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return "\n" + behind_margin(self._text)


def one_line(text: str) -> str:
    """The text with all that is not printed spelled out: line breaks, escapes, marks that turn text round."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def behind_margin(text: str) -> str:
    """Each line by itself made harmless, and moved in."""
    return "\n".join(MARGIN + one_line(line.expandtabs(4)) for line in text.split("\n"))


class _Shown:
    """Stands for an argument whose text had to be changed, however it is formatted."""

    def __init__(self, argument: object) -> None:
        self._argument = argument

    def __str__(self) -> str:
        return one_line(str(self._argument))

    def __repr__(self) -> str:
        return one_line(repr(self._argument))


def _in_place(record: logging.LogRecord) -> bool:
    """A filter that lets all pass, and changes what could be read as another record."""
    if isinstance(record.args, tuple):
        record.args = tuple(map(_harmless, record.args))
    if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
        # Formatters take this text where it is there; who reads `exc_info` (Sentry, JSON) still can.
        told = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        record.exc_text = behind_margin(told)
    return True


def _harmless(argument: Any) -> Any:
    if argument is None or isinstance(argument, int | float | Lines):
        return argument
    if isinstance(argument, str):
        return one_line(argument)
    return _Shown(argument)
