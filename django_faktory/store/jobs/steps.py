"""Record and read the committed steps of running jobs (ADR 0051).

A step belongs to the row of its job, so that a jid that is pushed again begins anew. No end of a job touches this
table: `purge` deletes the steps whose job has no row any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.payloads import Reservation
from ...core.steps import StepRecord
from ...errors import ReservationLost
from ...models import Job, JobStep
from ..dialects.base import JOB, STEP, utc
from ..store import Store
from ..transactions import read as read_rows
from ..transactions import run, select

PORTION = 5000
"""Number of steps whose jobs `purge` looks up at a time."""

# LOWER: see `lock_running`.
_OF_HELD_JOB = (
    f" FROM {JOB} AS j LEFT JOIN {STEP} AS s ON s.job_id = j.id"
    " WHERE j.jid = %s AND j.wid = %s AND j.attempt = %s AND LOWER(j.state) = 'working'"
)


def record_step(store: Store, job: Reservation, step: StepRecord) -> None:
    """Record a step as the last statement of the caller's `atomic` block, which must end right after this call.

    Raise ReservationLost if another attempt holds the job, and TransactionManagementError if the transaction is marked
    for rollback.
    """
    connection = store.connection
    connection.validate_no_broken_transaction()
    if not run(store.alias, lambda _: store.dialect.record_step(connection, job, step, store.clock())):
        raise ReservationLost("the job was no longer this worker's when a step ended: rolled back")


def read_steps(store: Store, job: Reservation) -> dict[tuple[str, str], StepRecord]:
    """Return what earlier runs of this job have committed, by name and key, without results.

    Raise ReservationLost if another attempt holds the job, or none.
    """
    columns = "s.name, s.step_key, s.reached, s.done, s.total, s.is_finished, s.until"
    rows = _select_of_held(store, job, f"s.pushed_at <> j.created_at, j.id, {columns}")
    # On SQLite and MariaDB, a jid that is pushed again takes the row of the earlier job, with its id.
    if any(is_of_earlier_job for is_of_earlier_job, *_ in rows):
        run(store.alias, lambda _: forget_steps([rows[0][1]], using=store.alias))
        return {}
    clock = store.now() if any(until for *_, until in rows) else None
    records: dict[tuple[str, str], StepRecord] = {}
    for _, _, name, key, reached, done, total, is_finished, ends in rows:
        if name is None:  # it has none
            continue
        until = ends and utc(ends)
        records[name, key] = StepRecord(
            name=name,
            key=key,
            reached=reached,
            done=done,
            total=total,
            is_finished=bool(is_finished),
            until=until,
            is_over=bool(until and clock and until <= clock),
        )
    return records


def read_step_result(store: Store, job: Reservation, name: str, key: str) -> str | None:
    """Return the result of a committed step. Raise ReservationLost as `read_steps` does."""
    [(result,)] = _select_of_held(store, job, "s.result", " AND s.name = %s AND s.step_key = %s", name, key)
    return None if result is None else str(result)


def _select_of_held(
    store: Store, job: Reservation, columns: str, more: str = "", *values: str
) -> list[tuple[Any, ...]]:
    sql = f"SELECT {columns}{_OF_HELD_JOB}{more}"
    rows = select(sql, [job.jid, job.wid, job.attempt, *values], using=store.alias)
    if not rows:
        raise ReservationLost("the job was no longer this worker's when a step began")
    return rows


def record_pause(job: Job, name: str, key: str, until: datetime, now: datetime) -> datetime:
    """Record that the run of a locked job begins a sleep or wait, unless an earlier run has; return its end."""
    rows = JobStep.objects.using(job._state.db)  # noqa: SLF001  (documented)
    begun = rows.filter(job_id=job.pk, name=name, key=key).values_list("until", flat=True).first()
    if begun is None:
        rows.create(
            job_id=job.pk,
            name=name,
            key=key,
            pushed_at=job.created_at,
            attempt=job.attempt,
            is_finished=False,
            until=until,
            started_at=now,
            recorded_at=now,
        )
    return begun or until


def find_progressed(jobs: Sequence[Job], *, using: str) -> set[int]:
    """Return the ids of these running jobs whose current run has committed a step."""
    # No two runs have an attempt in common (ADR 0048).
    runs = JobStep.objects.using(using).filter(
        job_id__in=[job.pk for job in jobs], attempt__in=[job.attempt for job in jobs]
    )
    return set(runs.values_list("job_id", flat=True)) if jobs else set()


def has_steps(job: Job) -> bool:
    """Return whether runs of this job have committed a step."""
    steps = JobStep.objects.using(job._state.db).filter(job_id=job.pk, pushed_at=job.created_at)  # noqa: SLF001
    return bool(read_rows(steps.values_list("job_id", flat=True)[:1]))


def forget_steps(job_ids: Sequence[int], *, using: str) -> None:
    """Delete the steps of these jobs, inside the caller's transaction."""
    JobStep.objects.using(using).filter(job_id__in=job_ids).delete()


def purge(*, using: str, after: int | None = None, portion: int = PORTION) -> int | None:
    """Delete steps whose job has no row any more, and read at most `portion` of them.

    Ids of jobs are never used again. Return the id of the last job that was looked up, for the next call; None at the
    end.
    """
    steps = JobStep.objects.using(using).filter(job_id__gt=after or 0).order_by("job_id")
    found = read_rows(steps.values_list("job_id", flat=True)[:portion])
    if not found:
        return None
    ids = set(found)
    gone = sorted(ids - set(read_rows(Job.objects.using(using).filter(pk__in=ids).values_list("pk", flat=True))))

    def verb(_: BaseDatabaseWrapper) -> None:
        forget_steps(gone, using=using)

    if gone:
        run(using, verb)
    return found[-1] if len(found) == portion else None
