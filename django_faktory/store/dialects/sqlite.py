"""Dialect for SQLite: one writer at a time, so no row locks are needed. Its clock is this machine's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import UTC, datetime

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from .base import JOB
from .job_columns import replaceable
from .portable import PortableDialect
from .write_queue import write_queue


class SqliteDialect(PortableDialect):
    """Dialect for SQLite 3.24 and later, which has upserts. Times are stored and compared as text."""

    upsert_tail = (
        "ON CONFLICT (jid) DO UPDATE SET "
        + ", ".join(f"{column} = excluded.{column}" for column in PortableDialect._replaced)  # noqa: SLF001
        + f" WHERE {replaceable(f'{JOB}.')}"
    )
    # SQLite has no GREATEST and LEAST; with two arguments, MAX and MIN are not aggregates.
    greatest, least = "MAX", "MIN"
    own_mark = "0"

    has_single_writer = True

    # Deferred: the transaction takes no write lock, and its snapshot begins with its first read.
    begin_snapshot = ("BEGIN DEFERRED",)

    def write_queue(self, connection: BaseDatabaseWrapper) -> AbstractContextManager[object]:
        """Return the queue of this database file.

        Other processes, and transactions of the project's own code, still wait by SQLite's rules.
        """
        return write_queue(str(connection.settings_dict["NAME"]))

    names_of_json = "SELECT value FROM json_each(%s)"

    def age(self, moment: str) -> str:
        """Return SQL for the seconds since `moment`, with milliseconds, by this machine's clock."""
        return f"(JULIANDAY('now') - JULIANDAY({moment})) * 86400.0"

    def now(self, cursor: CursorWrapper) -> datetime:  # noqa: ARG002
        return datetime.now(UTC)

    def await_claims(self, connection: BaseDatabaseWrapper) -> None:
        """Return at once: no claim can run while this process writes."""

    def after(self, moment: str, seconds: str) -> str:
        # Percent signs are doubled, because Django substitutes the parameters of the statement by formatting.
        return f"STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', {moment}, '+' || {seconds} || ' seconds')"


SQLITE = SqliteDialect()
