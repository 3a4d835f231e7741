"""Signals to jobs, and the jobs that wait for them (ADR 0052).

A signal is one INSERT that locks no job. Its job is woken after the commit; a job that parks looks for signals after
its own commit; `sweep` wakes the jobs of which the process was killed in between.
"""

from __future__ import annotations

from collections.abc import Collection

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Exists, OuterRef

from ...core.lifecycle import ENDED, State
from ...core.payloads import Reservation
from ...core.steps import MAX_STEP_BYTES, MAX_STEP_NAME, is_step_name
from ...errors import InvalidPayload, InvalidTransition, JobNotFound
from ...models import Job, JobSignal
from ..maintenance.due import enqueue
from ..store import Store
from ..transactions import after_commit, read, run

PORTION = 1000
"""Number of signals that `sweep` reads at a time."""


def signal(store: Store, jid: str, name: str, payload: str) -> None:
    """Send a signal to a job, in the caller's transaction if there is one. `payload` is JSON.

    It is kept until the job takes it, which may wait for it already, later or never. Raises JobNotFound,
    InvalidTransition if the job has ended for good, InvalidPayload.
    """
    if not is_step_name(name):
        raise InvalidPayload(
            "signal: expected a name of 1 to %(most)s printable characters, got %(value)s",
            most=MAX_STEP_NAME,
            value=f"{name!r:.80}",
        )
    size = len(payload.encode("utf-8", "surrogatepass"))
    if size > MAX_STEP_BYTES:
        raise InvalidPayload(
            "signal %(name)s: expected at most %(most)s bytes of JSON, got %(size)s",
            name=repr(name),
            most=f"{MAX_STEP_BYTES:,}",
            size=f"{size:,}",
        )
    jobs = Job.objects.using(store.alias).filter(jid=jid).order_by("-pk").values_list("pk", "created_at", "state")
    job = next(iter(read(jobs[:1])), None) if jid.isprintable() else None
    if job is None:
        raise JobNotFound(jid)
    job_id, pushed_at, state = job
    if state in ENDED:
        raise InvalidTransition("a job that is %(state)s cannot %(event)s", state=state, event="take a signal")
    row = JobSignal(job_id=job_id, pushed_at=pushed_at, name=name, payload=payload)
    run(store.alias, lambda _: row.save(using=store.alias, force_insert=True), atomic=False, writes=True)
    after_commit(store.alias, wake, store, [job_id])


def wake(store: Store, job_ids: Collection[int]) -> set[str]:
    """Enqueue those of these jobs that wait for a signal that was sent; return their queues.

    Skips locked rows: one that is parking looks for signals itself. A job that is woken without need parks again.
    """
    sent = JobSignal.objects.using(store.alias).filter(job_id=OuterRef("pk"), name=OuterRef("waits_for"))
    parked = store.jobs.filter(Exists(sent), pk__in=job_ids, state=State.SCHEDULED)
    ids = read(parked.values_list("pk", flat=True))
    if not ids:
        return set()

    def verb(connection: BaseDatabaseWrapper) -> set[str]:
        # By id: MariaDB may lock the rows of a subquery too.
        rows = store.jobs.filter(pk__in=ids, state=State.SCHEDULED).order_by("pk").select_for_update(skip_locked=True)
        return enqueue(store, connection, list(rows.values_list("pk", "queue", "lock_key")))

    queues = run(store.alias, verb)
    store.announce(queues)
    return queues


def find_signal(store: Store, job: Reservation, name: str) -> tuple[int, str] | None:
    """Return id and payload of the oldest signal of this name that was sent to the job; None if there is none."""
    ids = store.jobs.filter(jid=job.jid, attempt=job.attempt).values("pk")
    # A jid that is pushed again may take the row of the earlier job, with its signals.
    sent = JobSignal.objects.using(store.alias).filter(job_id__in=ids, pushed_at=job.created_at, name=name)
    return next(iter(read(sent.order_by("pk").values_list("pk", "payload")[:1])), None)


def take_signal(store: Store, signal_id: int) -> None:
    """Delete a signal, inside the transaction that records its payload as a step."""
    JobSignal.objects.using(store.alias).filter(pk=signal_id).delete()


def forget_signals(job_ids: Collection[int], *, using: str) -> None:
    """Delete the signals to these jobs, inside the caller's transaction."""
    JobSignal.objects.using(using).filter(job_id__in=job_ids).delete()


def sweep(store: Store, *, after: int | None = None, portion: int = PORTION) -> tuple[set[str], int | None]:
    """Wake jobs whose signal did not, and delete signals to jobs that have ended; read at most `portion` signals.

    Return the queues of the jobs, and the id of the last signal, for the next call; None at the end.
    """
    signals = JobSignal.objects.using(store.alias)
    found = read(signals.filter(pk__gt=after or 0).order_by("pk").values_list("pk", "job_id", "pushed_at")[:portion])
    if not found:  # nearly always true
        return set(), None
    live = dict(read(store.jobs.filter(pk__in={job_id for _, job_id, _ in found}).values_list("pk", "created_at")))
    gone = [pk for pk, job_id, pushed_at in found if live.get(job_id) != pushed_at]
    if gone:
        run(store.alias, lambda _: signals.filter(pk__in=gone).delete(), atomic=False, writes=True)
    return wake(store, live), found[-1][0] if len(found) == portion else None
