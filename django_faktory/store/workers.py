"""Worker processes: registration, heartbeats, and which are alive or must stop. Rules: W15, W20, W21.

`register` and `unregister` change the rows, `beat` records heartbeats, `find_stale_wids` lists lost workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import BigIntegerField, Case, Count, Exists, F, OuterRef, Q, QuerySet, Value, When
from django.db.models.functions import Now

from ..core.lifecycle import State
from ..core.payloads import Beat, WorkerIdentity, is_storable, make_storable
from ..errors import FaktoryError, InvalidPayload, UnknownWorker
from ..models import Job, WorkerProcess
from .chunks import chunks
from .dialects.base import DELIVERY_LEASE_S
from .jobs import failures, releases
from .locks import locks
from .notifier.base import ANY_QUEUE
from .store import Store
from .transactions import read, run

CHUNK = 500
"""Jobs whose reservations one statement extends."""

CONFIRMED_WITHIN_S = 5.0
"""Seconds after a delivery in which its node confirms it, unless the node was killed; see `DeliveryTracker`."""

# A worker only moves forward through these states (W21).
_ORDER = {"running": 0, "quiet": 1, "terminate": 2}


def register(store: Store, identities: Sequence[WorkerIdentity]) -> list[FaktoryError | None]:
    """Register worker processes; a known one keeps its state. Return None or the error for each.

    At most four statements, for any number of identities.
    """
    refusals = [None if _has_storable_wid(worker) else InvalidPayload(_WRONG_WID) for worker in identities]
    storable = {worker.wid: worker for worker, refusal in zip(identities, refusals, strict=True) if refusal is None}

    def verb(_: BaseDatabaseWrapper) -> None:
        rows = WorkerProcess.objects.using(store.alias)
        registered = rows.filter(wid__in=sorted(storable))
        # When all are known, as after a reconnect, the UPDATE is the only statement.
        if registered.update(seen_at=Now()) < len(storable):
            registered_wids = set(registered.values_list("wid", flat=True))
            # In wid order: two nodes that insert the same workers in different orders would deadlock.
            missing = [_build_row(worker) for wid, worker in sorted(storable.items()) if wid not in registered_wids]
            rows.bulk_create(missing, ignore_conflicts=True)

    if storable:
        run(store.alias, verb)
    return [*refusals]


_WRONG_WID = "wid: expected at most 255 characters without NUL; choose another wid"


def _has_storable_wid(worker: WorkerIdentity) -> bool:
    return is_storable(worker.wid) and len(worker.wid) <= 255


def _build_row(worker: WorkerIdentity) -> WorkerProcess:
    return WorkerProcess(
        wid=worker.wid,
        hostname=make_storable(worker.hostname)[:255],
        pid=max(-(2**63), min(worker.pid, 2**63 - 1)),
        labels=[make_storable(label) for label in worker.labels],
        queues=[make_storable(name) for name in worker.queues] if worker.threads else None,
        threads=worker.threads or None,
    )


def beat(store: Store, beats: Sequence[Beat]) -> list[FaktoryError | str]:
    """Record heartbeats; return for each "", the state the worker must enter, or the error.

    The state only moves forward. The UPDATE and the SELECT of the workers are not one transaction: a worker that is
    deleted in between is unknown to the SELECT. Also extends the reservations of these workers' jobs to at least
    twice `store.worker_timeout_s` from now, so that a worker counts as lost before any of its reservations ends
    (ADR 0026), and their locks by their leases. Rows of jobs and locks that another transaction has locked are skipped.
    """
    # An idle worker sends no FETCH, but jobs of claims without an answer must not wait for the end of a reservation.
    releases.release_unanswered(store)
    latest = {beat.wid: beat for beat in beats if is_storable(beat.wid)}
    workers = WorkerProcess.objects.using(store.alias).filter(wid__in=latest)
    # One UPDATE for all beats, each with its own memory size.
    rss_kb = Case(
        *(When(wid=wid, then=Value(_clamp_kb(beat.rss_kb))) for wid, beat in latest.items()),
        default=F("rss_kb"),
        output_field=BigIntegerField(),
    )
    if latest:
        seen = {"beat_at": Now(), "seen_at": Now(), "rss_kb": rss_kb}
        run(store.alias, lambda _: workers.update(**seen), atomic=False, writes=True)
    # Read after the UPDATE: a state set by another process between the two statements is returned, not overwritten.
    state_by_wid = run(store.alias, lambda _: dict(workers.values_list("wid", "state")), atomic=False)
    # Only known workers: an unknown one receives an error and has to register again.
    locks.extend(state_by_wid, using=store.alias)
    _extend(store, [beat for beat in beats if beat.wid in state_by_wid])
    states = dict(state_by_wid)
    for beat in beats:
        if beat.wid in state_by_wid:
            states[beat.wid] = max(states[beat.wid], beat.current_state, key=_rank)
    for state in ("quiet", "terminate"):
        moved = [wid for wid in state_by_wid if states[wid] == state and state_by_wid[wid] != state]
        if moved:
            advance(moved, state, using=store.alias)
    return [_reply_to(beat.wid, states) for beat in beats]


def _extend(store: Store, beats: Sequence[Beat]) -> None:
    """Extend the reservations of the jobs that the beats name, and of those that a killed node has probably delivered.

    With `keeps_delivered`, also of all delivered jobs.
    """
    held_jobs = [(beat.wid, jid, attempt) for beat in beats for jid, attempt in beat.held or () if is_storable(jid)]
    held_jobs += _find_delivered(store, [beat.wid for beat in beats if beat.keeps_delivered and beat.wid])
    held_jobs += _find_unconfirmed(store, [beat.wid for beat in beats if beat.held is None])
    at_least_s = 2 * store.worker_timeout_s
    for chunk in chunks(held_jobs, CHUNK):
        extend = partial(store.dialect.extend, held_jobs=chunk, at_least_s=at_least_s, now=store.clock())
        run(store.alias, extend, atomic=not store.dialect.one_statement)


def _find_delivered(store: Store, wids: Sequence[str]) -> list[tuple[str, str, int]]:
    """Return (wid, jid, attempt) of these workers' jobs with a confirmed delivery.

    A job with an unconfirmed delivery may not have reached the worker, so the worker's BEAT must not extend it.
    """
    if not wids:
        return []
    working = store.jobs.in_state(State.WORKING).filter(wid__in=wids)
    delivered = working.filter(Q(claim__isnull=True) | Q(claim__gte=0)).values_list("wid", "jid", "attempt")
    return read(delivered)


def _find_unconfirmed(store: Store, wids: Sequence[str]) -> list[tuple[str, str, int]]:
    """Return (wid, jid, attempt) of jobs that were claimed for these workers by a node that did not confirm them.

    That node was killed. The worker has the job, unless the node was killed in the millisecond between claim and
    delivery. Each job is found in its first lease only, so that a job without a worker does not wait for longer than
    one reservation.
    """
    moment = store.clock() or Now()
    unconfirmed = (
        store.jobs.in_state(State.WORKING)
        .filter(
            wid__in=wids,
            claim__lt=0,
            started_at__lt=moment - timedelta(seconds=CONFIRMED_WITHIN_S),
            started_at__gt=moment - timedelta(seconds=DELIVERY_LEASE_S + CONFIRMED_WITHIN_S),
            # The range of the index of running jobs: it is empty while nodes confirm their deliveries.
            reserved_until__lt=moment + timedelta(seconds=DELIVERY_LEASE_S - CONFIRMED_WITHIN_S),
        )
        .values_list("wid", "jid", "attempt")
    )
    return read(unconfirmed) if wids else []


def advance(wids: Sequence[str] | None, state: str, *, using: str) -> int:
    """Move these workers, or all if None, on to quiet or terminate; return how many moved.

    Workers in a later state stay there. From then on claims give them no job, including FETCHes that already wait
    (W15); each worker receives the state at its next BEAT (W21).
    """
    earlier = [name for name, rank in _ORDER.items() if rank < _ORDER[state]]
    workers = WorkerProcess.objects.using(using).filter(state__in=earlier)
    moved = workers if wids is None else workers.filter(wid__in=list(filter(is_storable, wids)))
    return run(using, lambda _: moved.update(state=state), atomic=False, writes=True)


def living(seen_within_s: float) -> Q:
    """Match worker processes that were seen lately or hold jobs.

    A client that sends no BEAT counts as alive while it works.
    """
    holders = Job.live.in_state(State.WORKING).values("wid")
    # As a Query, which has no alias: the rows that it filters may be in any database.
    return Q(seen_at__gte=Now() - timedelta(seconds=seen_within_s)) | Q(wid__in=holders.query)


def count_jobs_of(wids: Sequence[str], *, using: str) -> dict[str, int]:
    """Return the number of jobs that each of these workers holds, without workers that hold none."""
    held_jobs = Job.live.using(using).in_state(State.WORKING).filter(wid__in=wids)
    counted = held_jobs.order_by().values_list("wid").annotate(Count("pk"))
    return run(using, lambda _: dict(counted), atomic=False)


def unregister(store: Store, wids: Sequence[str]) -> None:
    """Unregister workers that ended normally; jobs that they still hold return to their old places."""

    def verb(_: BaseDatabaseWrapper) -> int:
        # In the transaction of the deletion: jobs of a wid without a row wait for `find_unknown_wids`.
        returned = failures.interrupt_workers(store, wids)
        WorkerProcess.objects.using(store.alias).filter(wid__in=wids).delete()
        return returned

    if run(store.alias, verb):  # the queues are not known here, so workers of all queues are woken
        store.announce({ANY_QUEUE})


def find_stale_wids(timeout_s: float, *, using: str) -> list[str]:
    """Return workers that sent a BEAT, but none for `timeout_s`: their jobs must be reclaimed (W20)."""
    return read(find_stale_workers(timeout_s, using=using).values_list("wid", flat=True))


def find_stale_workers(timeout_s: float, *, using: str) -> QuerySet[WorkerProcess]:
    """Return the rows of the workers that `find_stale_wids` lists."""
    return WorkerProcess.objects.using(using).filter(beat_at__lt=Now() - timedelta(seconds=timeout_s))


def find_unknown_wids(held_for_s: float, *, using: str) -> list[str]:
    """Return at most 100 wids that hold jobs for `held_for_s` without being registered.

    This happens when a worker is deleted while a claim for it is being committed.
    """
    old_jobs = Job.live.using(using).in_state(State.WORKING).exclude(wid="")
    old_jobs = old_jobs.filter(started_at__lt=Now() - timedelta(seconds=held_for_s))
    holders = old_jobs.filter(~Exists(WorkerProcess.objects.filter(wid=OuterRef("wid")))).values_list("wid", flat=True)
    return read(holders.distinct()[:100])


def delete_stale(timeout_s: float, *, using: str) -> int:
    """Delete workers that never sent a BEAT, were not seen for `timeout_s`, and hold no job (W20)."""
    limit = Now() - timedelta(seconds=timeout_s)
    held_jobs = Job.live.filter(state=State.WORKING, wid=OuterRef("wid"))

    def verb(_: BaseDatabaseWrapper) -> int:
        workers = WorkerProcess.objects.using(using).filter(beat_at=None, seen_at__lt=limit)
        wids = list(workers.filter(~Exists(held_jobs)).values_list("wid", flat=True))
        # Deletes with the condition on `seen_at` again, so a worker that was seen since stays.
        return workers.filter(wid__in=wids).delete()[0]

    return run(using, verb)


def _rank(state: str) -> int:
    return _ORDER.get(state, -1)


def _reply_to(wid: str, states: dict[str, str]) -> FaktoryError | str:
    if wid not in states:
        return UnknownWorker(wid)
    return "" if states[wid] == "running" else states[wid]


def _clamp_kb(kb: int) -> int:
    return max(0, min(kb, 2**63 - 1))
