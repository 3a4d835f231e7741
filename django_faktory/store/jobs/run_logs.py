"""Store the log lines of runs that report success, before their jobs end.

Use separate statements: an extra column in the statement that ends jobs would slow down every job.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.lifecycle import State
from ...core.payloads import Ack, in_ascii
from ...models import Job
from ..chunks import chunks
from ..dialects.base import JOB, holds, marks
from ..store import Store
from ..transactions import limited_lock_wait, run, run_each
from . import history

CHUNK = 100
"""Runs in one statement, whose CASE compares each row with every id."""
LOCK_WAIT_S = 1.0
"""Seconds that log lines wait for another transaction: the acknowledgements of the same jobs wait for them."""


def keep_logs(store: Store, acks: Sequence[Ack]) -> None:
    """Append the lines of these runs to the histories of their jobs.

    Skip runs that have ended or whose job another worker holds. Call it once for each run: a second call appends the
    lines again. Raise BrokerUnavailable if the database is unavailable, LockTimeout after `LOCK_WAIT_S`.
    """

    def keep(part: Sequence[Ack]) -> list[None]:
        run(store.alias, partial(_append, acks=part))
        return [None] * len(part)

    with limited_lock_wait(LOCK_WAIT_S):
        for chunk in chunks(acks, CHUNK):
            run_each(store.alias, keep, chunk, lambda ack, _: keep([with_log_in_ascii(ack)])[0])


def with_log_in_ascii(ack: Ack) -> Ack:
    """Return the report with lines that a database of any encoding can store."""
    return msgspec.structs.replace(ack, log=(*map(in_ascii, ack.log),))


def _append(connection: BaseDatabaseWrapper, acks: Sequence[Ack]) -> None:
    """Lock the rows that these runs hold, and write their histories."""
    ack_by_jid = {ack.jid: ack for ack in acks}
    # By jid only: with the state, MariaDB may walk the index of running jobs and wait for rows of other workers.
    # In the order of ids, as all transactions lock jobs (ADR 0024).
    rows = Job.live.using(connection.alias).filter(jid__in=list(ack_by_jid)).order_by("pk").select_for_update()
    values: list[int | str] = []
    ids: list[int] = []
    for job in rows.only("jid", "state", "wid", "attempt", "started_at", "history"):
        ack = ack_by_jid[job.jid]
        if job.state == State.WORKING and holds(ack.wid, ack.attempt, job.wid, job.attempt):
            values += [job.pk, history.append_log(job, ack)]
            ids.append(job.pk)
    if not ids:
        return
    # Written as text: Django takes 10 ms to compile the same statement for 100 rows.
    cases = " WHEN %s THEN %s" * len(ids)
    sql = f"UPDATE {JOB} SET history = CASE id{cases} END WHERE id IN ({marks(ids)})"
    with connection.cursor() as cursor:
        cursor.execute(sql, [*values, *ids])
