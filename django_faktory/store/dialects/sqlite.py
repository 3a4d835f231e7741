"""SQLite: one writer at a time, so that no row lock is needed. Its clock is this machine's."""

from __future__ import annotations

from datetime import UTC, datetime

from django.db.backends.utils import CursorWrapper

from .base import FINISHED_SQL, JOB, PortableDialect


class SqliteDialect(PortableDialect):
    """Upserts and UPDATE need SQLite 3.24; times are text, compared as text."""

    upsert_tail = (
        "ON CONFLICT (jid) DO UPDATE SET "
        + ", ".join(f"{column} = excluded.{column}" for column in PortableDialect._replaced)  # noqa: SLF001
        + f" WHERE {JOB}.state IN ({FINISHED_SQL})"
    )
    count_tail = (
        "ON CONFLICT (day, slot) DO UPDATE SET processed = processed + excluded.processed,"
        " failed = failed + excluded.failed, late = late + excluded.late"
    )

    def now(self, cursor: CursorWrapper) -> datetime:  # noqa: ARG002
        """The file is on this machine, and so is its clock."""
        return datetime.now(UTC)

    def after(self, moment: str, seconds: str) -> str:
        """Milliseconds are enough for a reservation's end."""
        return f"STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', {moment}, '+' || {seconds} || ' seconds')"


SQLITE = SqliteDialect()
