"""Store the log lines of runs that report success, before their jobs end.

Statements of their own: a column in the statement that ends jobs would cost every job, and most jobs log nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.json import jsontext
from ...core.lifecycle import State
from ...core.payloads import LOGGED, Ack
from ...models import Job
from ..dialects.base import JOB
from ..transactions import run

CHUNK = 100
"""Runs in one statement: it compares each row with each of them."""


def keep_logs(acks: Sequence[Ack], *, using: str) -> None:
    """Append the lines of these runs to the histories of their jobs.

    Runs that have ended, or whose jobs another worker has, store nothing. Call it once for each run: a second call
    appends the lines again.
    """
    for start in range(0, len(acks), CHUNK):
        run(using, _Append(acks[start : start + CHUNK], using).execute)


class _Append:
    """One transaction that appends the lines of these runs."""

    def __init__(self, acks: Sequence[Ack], using: str) -> None:
        self.entries = {(ack.jid, ack.wid, ack.attempt): _entry(ack) for ack in acks}
        self.using = using

    def execute(self, connection: BaseDatabaseWrapper) -> None:
        """Lock the rows that these runs hold, and write their histories."""
        # By key: all transactions lock the rows of jobs in this order (ADR 0024).
        running = Job.objects.using(self.using).in_state(State.WORKING).order_by("pk")
        if connection.features.has_select_for_update:
            running = running.select_for_update()
        rows = running.filter(jid__in=[jid for jid, _, _ in self.entries])
        values: list[int | str] = []
        keys: list[int] = []
        for pk, jid, wid, attempt, history in rows.values_list("pk", "jid", "wid", "attempt", "history"):
            if entry := self.entries.get((jid, wid, attempt)):
                values += [pk, f"{history[:-1]},{entry}]" if history else f"[{entry}]"]
                keys.append(pk)
        if not keys:
            return
        # Written as text: Django takes 10 ms to compile the same statement for 100 rows.
        cases, places = " WHEN %s THEN %s" * len(keys), ", ".join(["%s"] * len(keys))
        sql = f"UPDATE {JOB} SET history = CASE id{cases} END WHERE id IN ({places})"
        with connection.cursor() as cursor:
            cursor.execute(sql, [*values, *keys])


def _entry(ack: Ack) -> str:
    return jsontext.encode({"kind": LOGGED, "attempt": ack.attempt, "wid": ack.wid, "log": ack.log})
