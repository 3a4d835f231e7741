"""Import jobs with their history from the original server, and export jobs to it. See docs/import-faktory.md.

A receipt, a row that lists the imported jids, is stored in the transaction that stores the jobs. If an import stops
before the jobs are removed from the source, the next one finds the receipt, even if the jobs have already run and are
deleted.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet

from ..core.json import jsontext
from ..core.json.fields import parse_instant
from ..core.lifecycle import DEAD_FOR_S, FAILED, GONE, Event, State, sources
from ..errors import InvalidPayload
from ..models import Job, JobQuerySet
from .deletion import delete_locked
from .dialects import clock_of
from .jobs import transitions
from .locks import locks
from .transactions import run

RECEIPT = "django_faktory.import_receipt"
CHUNK = 500


class JobHistory(NamedTuple):
    """The history that an imported job brings."""

    state: State
    ends_at: datetime | None
    failures: int
    failure: str
    errtype: str


def find_stored(jids: Sequence[str], *, using: str) -> set[str]:
    """Return the jids among these that are stored, in any state."""
    return set(Job.objects.using(using).filter(jid__in=jids).values_list("jid", flat=True))


def write_history(histories: Mapping[str, JobHistory], *, using: str) -> None:
    """Restore the state of jobs pushed in this transaction: retry, dead, or earlier failures.

    A retry that is due stays enqueued.
    """
    changed = {jid: past for jid, past in histories.items() if past.failures or past.state in FAILED}
    rows = list(Job.live.using(using).filter(jid__in=list(changed)))
    # A job that becomes dead may have been pushed as the ready one of its key.
    keys = {row.lock_key for row in rows if row.lock_key and changed[row.jid].state is State.DEAD}
    for row in rows:
        past = changed[row.jid]
        row.failures, row.failure, row.errtype = past.failures, past.failure, past.errtype
        row.history = _encode_history(past)
        if past.state is State.DEAD and past.ends_at is not None:
            row.state, row.run_at, row.limiter = State.DEAD, None, None
            # The original server stores only the time at which a dead job is deleted.
            row.finished_at, row.purge_at = past.ends_at - timedelta(seconds=DEAD_FOR_S), past.ends_at
        elif past.state is State.RETRIES and row.state == State.SCHEDULED:
            row.state = State.RETRIES
        row.failed_at = row.finished_at or _first_failed_at(past) or row.created_at
    columns = "state failures failure errtype history run_at limiter finished_at purge_at failed_at"
    if rows:
        Job.live.using(using).bulk_update(rows, columns.split(), batch_size=100)
    locks.promote_waiters_later(connections[using], keys)


def _encode_history(past: JobHistory) -> str:
    """Return the history of an imported job: its latest failed attempt, the only one that is known.

    Pages, results and the command line show the history, not the failure.
    """
    record = _decode_failure(past)
    if record is None:
        return ""
    message, lines, failed_at = record.get("message"), record.get("backtrace"), record.get("failed_at")
    attempt = {
        "attempt": past.failures,
        "wid": "",
        "started_at": "",
        # The original server stores the time of the first failure only.
        "failed_at": failed_at if isinstance(failed_at, str) and past.failures == 1 else "",
        "errtype": past.errtype,
        "message": message if isinstance(message, str) else "",
        "backtrace": [line for line in lines if isinstance(line, str)] if isinstance(lines, list) else [],
    }
    return jsontext.encode([attempt])


def _decode_failure(past: JobHistory) -> dict[str, Any] | None:
    with suppress(InvalidPayload):
        record = jsontext.decode(past.failure) if past.failure else None
        return record if isinstance(record, dict) else None
    return None


def _first_failed_at(past: JobHistory) -> datetime | None:
    with suppress(InvalidPayload):
        return parse_instant("failed_at", str((_decode_failure(past) or {}).get("failed_at")))
    return None


def insert_receipt(jids: Sequence[str], *, using: str) -> int:
    """Store a receipt for these imported jids; return its id.

    Delete it once the jobs are removed from the source.
    """
    connection = connections[using]
    now = clock_of(connection)
    name = f"{RECEIPT}-{secrets.token_hex(8)}"
    text = jsontext.encode({"jid": name, "jobtype": RECEIPT, "args": [list(jids)]})
    row = Job(
        jid=name,
        jobtype=RECEIPT,
        queue="default",
        # A finished state: no worker claims the row, and maintenance purges it if no import deletes it.
        state=State.SUCCEEDED,
        payload=text,
        created_at=now,
        finished_at=now,
        purge_at=now + timedelta(seconds=DEAD_FOR_S),
    )
    row.save(using=using, force_insert=True)
    return int(row.pk)


def read_receipts(*, using: str) -> dict[int, list[str]]:
    """Return the jids of each stored receipt, by receipt id."""

    def verb(_: BaseDatabaseWrapper) -> dict[int, list[str]]:
        rows = _receipts(using).values_list("pk", "payload")
        return {pk: jsontext.decode(text)["args"][0] for pk, text in rows}

    return run(using, verb, atomic=False)


def delete_receipts(ids: Sequence[int], *, using: str) -> None:
    """Delete these receipts, after their jobs were removed from the source."""
    run(using, lambda _: _receipts(using).filter(pk__in=ids).delete(), atomic=False, writes=True)


def _receipts(using: str) -> QuerySet[Job]:
    return Job.objects.using(using).in_state(State.SUCCEEDED).filter(jobtype=RECEIPT)


def find_exportable(state: State, *, using: str) -> JobQuerySet:
    """Return jobs of this state that can be exported, in claim order. Jobs of batches cannot."""
    jobs = Job.live.using(using).in_state(state).filter(bid=None, callback_of=None)
    return jobs.order_by(*_ORDER.get(state, ("queue", "sort_priority", "enqueued_at", "id")))


_ORDER = {
    State.SCHEDULED: ("run_at", "id"),
    State.RETRIES: ("run_at", "id"),
    State.DEAD: ("purge_at", "id"),
}
EXPORTED = tuple(state for state in State if state in sources(Event.EXPORT))
"""States in which a job can be exported."""


def hand_over(jobs: JobQuerySet, write: Callable[[Sequence[Job]], None], *, using: str, limit: int) -> int:
    """Pass at most `limit` of these jobs to `write`, then delete them; return how many.

    Their rows are locked during that time, so that no worker claims them. `write` may receive a job twice if the
    transaction is retried.
    """

    def verb(_: BaseDatabaseWrapper) -> int:
        rows = list(jobs.in_state(*EXPORTED).select_for_update(skip_locked=True)[:limit])
        if not rows:
            return 0
        # Written to the target before the rows are deleted here: a crash in between leaves a job in both, never in none
        # (ADR 0018).
        write(rows)
        # With the legal states again, as in every change of jobs (`lifecycle.sources`).
        legal = Job.live.using(using).filter(pk__in=[row.pk for row in rows]).in_state(*EXPORTED)
        return transitions.leave(legal, GONE, delete_locked)

    return run(using, verb)
