"""MariaDB 10.6 and later (SKIP LOCKED). The session's time zone is UTC: Django sets it."""

from __future__ import annotations

import time
from datetime import datetime

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from .base import replaceable
from .portable import PortableDialect, utc

CLAIMED_WITHIN_S = 0.1


class MariadbDialect(PortableDialect):
    """Assignments of an upsert are made left to right, so that the state, which they ask for, comes last."""

    skip_lock = " FOR UPDATE SKIP LOCKED"
    plain_lock = " FOR UPDATE"
    upsert_tail = "ON DUPLICATE KEY UPDATE " + ", ".join(
        f"{column} = IF({replaceable()}, VALUES({column}), {column})"
        for column in PortableDialect._replaced  # noqa: SLF001
    )
    count_tail = (
        "ON DUPLICATE KEY UPDATE processed = processed + VALUES(processed), failed = failed + VALUES(failed),"
        " late = late + VALUES(late)"
    )

    def now(self, cursor: CursorWrapper) -> datetime:
        """One short round trip."""
        cursor.execute("SELECT UTC_TIMESTAMP(6)")
        found: datetime = cursor.fetchone()[0]
        return utc(found)

    def await_claims(self, connection: BaseDatabaseWrapper) -> None:  # noqa: ARG002
        """See Dialect. MariaDB does not tell which transactions have read a table: a claim takes some milliseconds, and
        the sweep counts the jobs of one that took longer than this."""
        time.sleep(CLAIMED_WITHIN_S)

    def after(self, moment: str, seconds: str) -> str:
        """See PortableDialect."""
        return f"({moment} + INTERVAL {seconds} SECOND)"


MARIADB = MariadbDialect()
