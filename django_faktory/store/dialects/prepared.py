"""Statements PostgreSQL plans once instead of at each use: planning the claim costs more than carrying it out.

By SQL's own PREPARE and EXECUTE, so that any driver and Django's query log see plain statements. A plan made while
the table was small must not outlive its time: it is made anew every few seconds. Behind a pooler that gives each
transaction another session PREPARE cannot work: that is noticed once, and statements then go as they are.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from django.db import Error
from django.db.backends.utils import CursorWrapper

logger = logging.getLogger(__name__)

REPLAN_S = 2.0
USES_BEFORE = 2
"""A connection that lives for one request gains nothing from a statement prepared for one use."""

_NO_SUCH_STATEMENT, _STATEMENT_EXISTS = "26000", "42P05"


class _Use:
    """How one connection has used one statement."""

    __slots__ = ("name", "planned_at", "uses")

    def __init__(self) -> None:
        self.uses = 0
        self.planned_at = 0.0
        self.name = ""


class Statement:
    """SQL with `$1, $2, …` of the given types. `execute` binds values; the rows are the cursor's."""

    works = True
    """Whether sessions stay with their connection; set to False for all when one was seen that did not."""

    def __init__(self, name: str, types: Sequence[str], sql: str) -> None:
        self.name, self.types, self.sql = name, types, sql
        self._plain = re.sub(r"\$(\d+)", lambda match: f"%(p{match[1]})s::{types[int(match[1]) - 1]}", sql)
        self._execute = f"({', '.join(['%s'] * len(types))})"
        self._uses: WeakKeyDictionary[Any, _Use] = WeakKeyDictionary()

    def execute(self, cursor: CursorWrapper, values: Sequence[Any]) -> None:
        """Run it with these values."""
        connection = cursor.db.connection
        use = self._uses.get(connection)
        if use is None:
            use = self._uses[connection] = _Use()
        use.uses += 1
        if not Statement.works or use.uses <= USES_BEFORE:
            self._execute_plain(cursor, values)
            return
        try:
            if time.monotonic() - use.planned_at > REPLAN_S:
                self._prepare(cursor, use)
            cursor.execute(f"EXECUTE {use.name}{self._execute}", values)
        except Error as error:
            if getattr(error.__cause__, "sqlstate", None) not in (_NO_SUCH_STATEMENT, _STATEMENT_EXISTS):
                raise
            Statement.works = False
            logger.warning("prepared statements are lost between transactions (a pooler?): going on without them")
            if cursor.db.in_atomic_block:
                raise  # the transaction is spoilt; the next one goes without
            self._execute_plain(cursor, values)

    def _execute_plain(self, cursor: CursorWrapper, values: Sequence[Any]) -> None:
        cursor.execute(self._plain, {f"p{place}": value for place, value in enumerate(values, 1)})

    def _prepare(self, cursor: CursorWrapper, use: _Use) -> None:
        old = f"DEALLOCATE {use.name}; " if use.name else ""
        name = f"faktory_{self.name}_{use.uses}"
        cursor.execute(f"{old}PREPARE {name} ({', '.join(self.types)}) AS {self.sql}")
        use.name, use.planned_at = name, time.monotonic()
