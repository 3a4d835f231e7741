"""Keep the latest lines that a task logs while it runs, for the report of its end (ADR 0040).

A job that logs nothing pays for one context variable. Lines of all loggers count, in the thread or asyncio task of the
job, and in threads and tasks that inherit its context. Independent of brokers and SQL.
"""

from __future__ import annotations

import logging
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Protocol

from .. import conf
from ..core.logs import one_line
from ..core.payloads import cut
from ..tasks import redaction

MAX_LINE_BYTES = 500
MAX_LOG_BYTES = 8 * 1024
"""Bytes of one line, and of all lines of an attempt: a retried job is written again with its history."""

NAMES_OF_TASKS = ("django.tasks", "django_tasks")
"""Loggers of Django and its backport that log the state of each task as it starts and ends.

Django's default settings enable the first one: every job would keep two lines that repeat its timeline.
"""

_original_factory: Any = None


class HasLog(Protocol):
    """A control of a running job, which has the lines that the job logs."""

    log: JobLog | None


running_control: ContextVar[HasLog | None] = ContextVar("django_faktory_job_log", default=None)
"""The job that keeps the lines of the current context. Set directly, since a function call would slow every job."""


class JobLog:
    """The latest lines of one attempt, at most `max_lines`."""

    __slots__ = ("_lines", "_lock", "_max_lines", "_omitted", "_size")

    def __init__(self, max_lines: int) -> None:
        self._max_lines = max_lines
        self._lines: list[str] = []
        self._lock = threading.RLock()  # threads with a copy of the context, and signal handlers, log here too
        self._omitted = self._size = 0

    def add(self, record: logging.LogRecord) -> None:
        """Keep the line of this record, and drop the oldest lines beyond the limits."""
        if not self._max_lines:
            return
        line = _format(record)
        with self._lock:
            self._lines.append(line)
            self._size += len(line.encode())
            while len(self._lines) > self._max_lines or self._size > MAX_LOG_BYTES:
                self._size -= len(self._lines.pop(0).encode())
                self._omitted += 1

    def lines(self) -> tuple[str, ...]:
        """Return the lines, oldest first, after a line that counts the dropped ones."""
        kept = tuple(self._lines[:])  # one atomic step: a job that was given up may still be logging
        return (f"… {self._omitted} earlier line{'s' * (self._omitted > 1)}", *kept) if self._omitted else kept


def install() -> None:
    """Watch the log records of this process. Further calls have no effect.

    A handler of the root logger would miss loggers that do not propagate, and would stop Python from printing the
    warnings of projects that configure no logging.
    """
    global _original_factory  # noqa: PLW0603  (the factory is global too)
    if _original_factory is None:
        _original_factory = logging.getLogRecordFactory()
        logging.setLogRecordFactory(_make_record)


def lines_of(control: HasLog) -> tuple[str, ...]:
    """Return the lines that the job has logged so far."""
    return () if control.log is None else control.log.lines()


def _make_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    record: logging.LogRecord = _original_factory(*args, **kwargs)
    control = running_control.get()
    # `makeLogRecord` builds records without a name: copies of records that were made elsewhere.
    if control is not None and record.name and record.name not in NAMES_OF_TASKS:
        if control.log is None:
            control.log = JobLog(_choose_limit())
        control.log.add(record)
    return record


def _choose_limit() -> int:
    # Lines that are never shown are not stored.
    return int(conf.get("LOG_LINES")) if redaction.shows_log() else 0


def _format(record: logging.LogRecord) -> str:
    try:
        message = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            message = f"{message}: {type(error).__qualname__}: {error}"
    except Exception:  # noqa: BLE001  (the project's code formats the arguments)
        message = "<a message that cannot be formatted>"
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:23]
    return cut(
        f"{at}Z {record.levelname} {one_line(record.name)}: {one_line(message[:MAX_LINE_BYTES])}", MAX_LINE_BYTES
    )
