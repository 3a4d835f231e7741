"""How jobs are doing: what TRACK SET says of them, and what TRACK GET tells (W27).

A tracked job is one whose row stays for a while after its end: so its state is where all states are, and jobs that
nobody tracks cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Exists, OuterRef, Q
from django.db.models.functions import Now

from .. import jsontext
from ..errors import InvalidPayload
from ..jsonfields import parse_instant
from ..lifecycle import LIVE, State
from ..models import Job, JobQuerySet, Tracking
from ..options import TRACKED_FOR_S
from ..payloads import Tracked, TrackUpdate
from .dialects import dialect_of
from .jobs import is_storable
from .transactions import run

CHUNK = 500
LONGEST_RESERVATION = timedelta(hours=24)
TRACKED_FOR = timedelta(seconds=TRACKED_FOR_S)

TOLD = {
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
"""The protocol's words: "dead" is what will not run again by itself."""


def track_set(updates: Sequence[TrackUpdate], *, using: str, now: datetime | None = None) -> None:
    """Keep what is said of stored jobs, each in a transaction of its own; a job that is not stored is let be."""
    for update in updates:
        if is_storable(update.jid):
            run(using, _Setting(update, using, now).carry_out)


class _Setting:
    """One TRACK SET."""

    def __init__(self, update: TrackUpdate, using: str, now: datetime | None) -> None:
        self.update, self.using, self.now = update, using, now

    def carry_out(self, connection: BaseDatabaseWrapper) -> None:
        """The verb."""
        job = Job.objects.using(self.using).filter(jid=self.update.jid)
        attempt = self.update.attempt
        if not (job.exists() if attempt is None else _is_running(connection, job.filter(attempt=attempt))):
            return
        with connection.cursor() as cursor:
            clock = self.now or dialect_of(connection).now(cursor)
        # Whoever is told of is tracked from now on, and for a while after.
        job.filter(Q(result_ttl=None) | Q(result_ttl__lt=TRACKED_FOR_S)).update(result_ttl=TRACKED_FOR_S)
        job.filter(purge_at__lt=clock + TRACKED_FOR).update(purge_at=clock + TRACKED_FOR)
        if self.update.reserve_until is not None:
            self._lengthen(min(self.update.reserve_until, clock + LONGEST_RESERVATION))
        told = {"percent": self.update.percent, "desc": self.update.desc}
        Tracking.objects.using(self.using).update_or_create(
            jid=self.update.jid,
            defaults={"updated_at": clock} | {name: value for name, value in told.items() if value is not None},
        )

    def _lengthen(self, until: datetime) -> None:
        held = Job.objects.using(self.using).filter(jid=self.update.jid, state=State.WORKING, reserved_until__lt=until)
        if self.update.wid:
            held = held.filter(wid__in=("", self.update.wid))
        held.update(reserved_until=until)


def _is_running(connection: BaseDatabaseWrapper, attempt: JobQuerySet) -> bool:
    """Whether the attempt still runs. Locks the job: a late word of an attempt must not overwrite its last one."""
    held = attempt.filter(state=State.WORKING).values_list("pk", flat=True)
    return bool(list(held.select_for_update() if connection.features.has_select_for_update else held))


def track_get(jids: Sequence[str], *, using: str) -> list[Tracked]:
    """How these jobs are doing, in the order asked."""
    asked = {jid for jid in jids if is_storable(jid)}

    def verb(_: BaseDatabaseWrapper) -> list[Tracked]:
        stored = {job.jid: job for job in Job.objects.using(using).filter(jid__in=asked).defer("payload", "result")}
        said = {one.jid: one for one in Tracking.objects.using(using).filter(jid__in=stored)}
        return [_tracked(jid, stored.get(jid), said.get(jid)) for jid in jids]

    return run(using, verb, atomic=False)


def _tracked(jid: str, job: Job | None, said: Tracking | None) -> Tracked:
    if job is None:
        return Tracked(jid=jid)
    changed_at = _changed_at(job)
    if said is None or said.updated_at < job.created_at:  # said of an earlier job of that jid
        return Tracked(jid=jid, state=TOLD[State(job.state)], updated_at=changed_at)
    return Tracked(
        jid=jid,
        percent=said.percent,
        desc=said.desc,
        state=TOLD[State(job.state)],
        updated_at=max(said.updated_at, changed_at),
    )


def _changed_at(job: Job) -> datetime:
    """When its state last changed, as far as its row tells."""
    times = [job.created_at, job.enqueued_at, job.started_at, job.finished_at, _failed_at(job.history)]
    return max(time for time in times if time is not None)


def _failed_at(history: str) -> datetime | None:
    """When the last attempt failed; a retrying job's row has no other place for it."""
    try:
        return parse_instant("failed_at", jsontext.decode(history)[-1]["failed_at"]) if history else None
    except (InvalidPayload, LookupError, TypeError):
        return None


def purge_tracking(*, using: str, now: datetime | None = None, limit: int = CHUNK) -> int:
    """Forget what was said of jobs that do not live, half an hour after the last word; at most `limit`."""
    lives = Job.objects.using(using).in_state(*LIVE).filter(jid=OuterRef("jid"))
    old = Tracking.objects.using(using).filter(~Exists(lives), updated_at__lt=(now or Now()) - TRACKED_FOR)

    def verb(_: BaseDatabaseWrapper) -> int:
        jids = list(old.order_by("updated_at").values_list("jid", flat=True)[:limit])
        return Tracking.objects.using(using).filter(jid__in=jids).delete()[0] if jids else 0

    return run(using, verb)
