"""Track the progress of jobs: TRACK SET and TRACK GET (W27).

The row of a tracked job stays for a while after the job's end (`result_ttl`), so TRACK GET reads the state from that
row. Only progress has a table of its own (`Tracking`), and jobs that are not tracked cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime, timedelta
from functools import partial

import msgspec
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Exists, OuterRef, Q
from django.db.models.functions import Now

from ...core.job_options import TRACKED_FOR_S
from ...core.json import jsontext
from ...core.json.fields import parse_instant
from ...core.lifecycle import UNFINISHED, State
from ...core.payloads import Tracked, TrackUpdate, in_ascii, is_storable
from ...errors import InvalidPayload
from ...models import Job, JobQuerySet, Tracking
from ..dialects import clock_of
from ..store import Store
from ..transactions import run

CHUNK = 500
LONGEST_RESERVATION = timedelta(hours=24)
TRACKED_FOR = timedelta(seconds=TRACKED_FOR_S)

PROTOCOL_STATES = {
    State.SCHEDULED: "enqueued",
    State.ENQUEUED: "enqueued",
    State.BLOCKED: "enqueued",
    State.WORKING: "working",
    State.RETRIES: "failed",
    State.SUCCEEDED: "success",
    State.DEAD: "dead",
    State.DISCARDED: "dead",
    State.EXPIRED: "dead",
}
"""State names of the protocol. "dead" covers all states in which the job will not run again unless it is requeued."""


def track_set(store: Store, updates: Sequence[TrackUpdate]) -> None:
    """Store progress updates, each in a transaction of its own. Updates of jobs that are not stored are ignored."""
    for update in updates:
        if not is_storable(update.jid):
            continue
        try:
            # A savepoint: a text that the database refuses must not break the transaction of an atomic task.
            with transaction.atomic(using=store.alias) if store.connection.in_atomic_block else nullcontext():
                run(store.alias, partial(_store, update=update, now=store.clock()))
        except InvalidPayload:
            plain = msgspec.structs.replace(update, desc=in_ascii(update.desc or ""))
            run(store.alias, partial(_store, update=plain, now=store.clock()))


def _store(connection: BaseDatabaseWrapper, update: TrackUpdate, now: datetime | None) -> None:
    """Store the update if its job exists and, if it names an attempt, that attempt is still running."""
    jobs = Job.objects.using(connection.alias)
    latest = jobs.only("state").latest_of(update.jid)
    if latest is None:
        return
    job = jobs.filter(pk=latest.pk).stored_for(State(latest.state))
    if update.attempt is not None and not _is_running(job.filter(attempt=update.attempt)):
        return
    clock = clock_of(connection, now)
    # The update makes the job a tracked job: keep its row for at least `TRACKED_FOR` after its end.
    job.filter(Q(result_ttl=None) | Q(result_ttl__lt=TRACKED_FOR_S)).update(result_ttl=TRACKED_FOR_S)
    job.filter(purge_at__lt=clock + TRACKED_FOR).update(purge_at=clock + TRACKED_FOR)
    if update.reserve_until is not None:
        until = min(update.reserve_until, clock + LONGEST_RESERVATION)
        # Only extend: a progress update must not shorten a reservation.
        reserved = job.filter(state=State.WORKING, reserved_until__lt=until)
        # A client without a wid claims jobs with wid "", so a mismatch is certain only if both sides have one.
        if update.wid:
            reserved = reserved.filter(wid__in=("", update.wid))
        reserved.update(reserved_until=until)
    reported = {"percent": update.percent, "desc": update.desc}
    Tracking.objects.using(connection.alias).update_or_create(
        jid=update.jid,
        defaults={"updated_at": clock} | {name: value for name, value in reported.items() if value is not None},
    )


def _is_running(job: JobQuerySet) -> bool:
    """Return True if the job is running; lock it.

    Without the lock, a late update of an attempt could overwrite its final one.
    """
    return bool(list(job.filter(state=State.WORKING).select_for_update().values_list("pk", flat=True)))


def track_get(store: Store, jids: Sequence[str]) -> list[Tracked]:
    """Return state and progress of these jobs, in the order of `jids`."""
    storable = {jid for jid in jids if is_storable(jid)}

    def verb(_: BaseDatabaseWrapper) -> list[Tracked]:
        # `payload` and `result` may be large, and are not returned.
        rows = Job.objects.using(store.alias).filter(jid__in=storable).order_by("pk").defer("payload", "result")
        stored = {job.jid: job for job in rows}  # the last of a jid is its latest run
        progress = {record.jid: record for record in Tracking.objects.using(store.alias).filter(jid__in=stored)}
        return [_build_tracked(jid, stored.get(jid), progress.get(jid)) for jid in jids]

    return run(store.alias, verb, atomic=False)


def _build_tracked(jid: str, job: Job | None, progress: Tracking | None) -> Tracked:
    if job is None:
        return Tracked(jid=jid)
    changed_at = _changed_at(job)
    if progress is None or progress.updated_at < job.created_at:  # progress of an earlier job with the same jid
        return Tracked(jid=jid, state=PROTOCOL_STATES[State(job.state)], updated_at=changed_at)
    return Tracked(
        jid=jid,
        percent=progress.percent,
        desc=progress.desc,
        state=PROTOCOL_STATES[State(job.state)],
        updated_at=max(progress.updated_at, changed_at),
    )


def _changed_at(job: Job) -> datetime:
    """Return the time of the latest state change that the row records."""
    times = [job.created_at, job.enqueued_at, job.started_at, job.finished_at, _failed_at(job.history)]
    return max(time for time in times if time is not None)


def _failed_at(history: str) -> datetime | None:
    """Return the time of the last failed attempt, or None. The row of a retrying job stores it in the history only."""
    try:
        return parse_instant("failed_at", jsontext.decode(history)[-1]["failed_at"]) if history else None
    except (InvalidPayload, LookupError, TypeError):
        return None


def purge_tracking(store: Store, *, limit: int = CHUNK) -> int:
    """Delete at most `limit` progress records, and return their number.

    Deletes the records of jobs that have finished or are not stored, half an hour after the last update.
    """
    live_jobs = store.jobs.in_state(*UNFINISHED).filter(jid=OuterRef("jid"))
    since = (store.clock() or Now()) - TRACKED_FOR
    outdated = Tracking.objects.using(store.alias).filter(~Exists(live_jobs), updated_at__lt=since)

    def verb(_: BaseDatabaseWrapper) -> int:
        # Select, then delete by jid: Django cannot limit a DELETE, and each transaction should be short.
        jids = list(outdated.order_by("updated_at").values_list("jid", flat=True)[:limit])
        return Tracking.objects.using(store.alias).filter(jid__in=jids).delete()[0] if jids else 0

    return run(store.alias, verb)
