"""Loggers with records that cannot be forged: text of clients, peers and tasks stays inside its record.

A name or message with a line break would otherwise start a new line in a log file and look like a record of its own; an
escape sequence would control the terminal that displays it. Imports the standard library only.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any

MARGIN = "    | "
"""Prefix of each further line of a record: no record starts like that."""

_NUMBERS = (int, float)


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module (`__name__`). Arguments and tracebacks are sanitized before any handler."""
    logger = logging.getLogger(name)
    logger.addFilter(_sanitize_record)  # addFilter ignores a filter that was added before
    return logger


class Lines:
    """An argument with intended line breaks: shown below the record, each line behind the margin."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return "\n" + indent_lines(self._text)


def one_line(text: str) -> str:
    """Return the text with unprintable characters escaped: line breaks, escape sequences, bidirectional marks."""
    if text.isprintable():
        return text
    # ascii() escapes the character; [1:-1] removes the quotes around it.
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def indent_lines(text: str) -> str:
    """Sanitize each line separately and indent it."""
    return "\n".join(MARGIN + one_line(line.expandtabs(4)) for line in text.split("\n"))


class _Sanitized:
    """Proxy for an argument that is sanitized when it is formatted, with `%s` or `%r`."""

    def __init__(self, argument: object) -> None:
        self._argument = argument

    def __str__(self) -> str:
        return one_line(str(self._argument))

    def __repr__(self) -> str:
        return one_line(repr(self._argument))


def _sanitize_record(record: logging.LogRecord) -> bool:
    """Filter that accepts every record and sanitizes it in place."""
    if isinstance(record.args, tuple):
        # Most arguments need no change. A worker logs a record for each job, so they cost no call of our own.
        for argument in record.args:
            if not (argument.isprintable() if type(argument) is str else type(argument) in _NUMBERS):
                record.args = tuple(map(_sanitize, record.args))
                break
    if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
        # Formatters use exc_text where it is set. Handlers that read `exc_info` (Sentry, JSON) still can.
        traceback_text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        record.exc_text = indent_lines(traceback_text)
    return True


def _sanitize(argument: Any) -> Any:
    # Numbers keep their type, because formats such as %d need it.
    if argument is None or isinstance(argument, int | float | Lines):
        return argument
    if isinstance(argument, str):
        return one_line(argument)
    return _Sanitized(argument)
