"""MariaDB 10.6 and later (SKIP LOCKED). The session's time zone is UTC: Django sets it."""

from __future__ import annotations

import math
import time
from datetime import datetime

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from .base import replaceable
from .portable import PortableDialect, utc

LEAST_WAIT_S = 0.1
"""The server counts whole seconds: a caller that wants to wait for less does not wait at all."""

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

    begin_snapshot = (
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY",
    )
    names_of_json = (
        "SELECT name FROM JSON_TABLE(%s, '$[*]' COLUMNS (name VARCHAR(255) CHARACTER SET utf8mb4 PATH '$')) AS given"
    )

    def age(self, moment: str) -> str:
        """By UTC, to the microsecond."""
        return f"TIMESTAMPDIFF(MICROSECOND, {moment}, UTC_TIMESTAMP(6)) / 1e6"

    def now(self, cursor: CursorWrapper) -> datetime:
        """One short round trip."""
        cursor.execute("SELECT UTC_TIMESTAMP(6)")
        found: datetime = cursor.fetchone()[0]
        return utc(found)

    has_lock_wait = True

    def lock_wait(self, seconds: float | None, *, of_transaction: bool = False) -> str:  # noqa: ARG002
        """See Dialect."""
        value = "DEFAULT" if seconds is None else 0 if seconds < LEAST_WAIT_S else math.ceil(seconds)
        return f"SET SESSION innodb_lock_wait_timeout = {value}"

    def await_claims(self, connection: BaseDatabaseWrapper) -> None:  # noqa: ARG002
        """See Dialect. MariaDB does not tell which transactions have read a table: a claim takes some milliseconds, and
        the sweep counts the jobs of one that took longer than this."""
        time.sleep(CLAIMED_WITHIN_S)

    def after(self, moment: str, seconds: str) -> str:
        """See PortableDialect."""
        return f"({moment} + INTERVAL {seconds} SECOND)"


MARIADB = MariadbDialect()
