"""Why a job waits: one function for the job's page, the command line and the API.

`read_reason` takes a bounded number of statements, and counts at most `MAX_AHEAD` rows.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext

from .. import conf
from ..core.lifecycle import State
from ..core.limits import Scope, rate_text
from ..errors import UnknownJobType
from ..models import Job, JobLock, JobQuerySet, Limit, Limiter, Measure, Queue, WorkerProcess
from ..models.pausable import Pausable
from ..store import workers
from ..store.statistics import bounded_counts
from .queue_sizes import format_number

MAX_AHEAD = 10_000
"""Jobs ahead of a job that are counted."""
MAX_WORKERS = 1000
"""Workers that are read to find those of a queue."""
OVERDUE_S = 60.0
"""A job is overdue if it is still scheduled this many seconds after its time."""
IDLE_S = 180.0
"""If no job of a queue has started for this time, workers that do not report their queues do not serve it."""


class Reason(NamedTuple):
    """Why a job waits."""

    kind: str
    """Fixed, so that programs can compare it: paused-queue, paused-task, no-workers, unserved-queue, limit, rate, lock,
    unknown-task, scheduled, signal, retry, overdue, or queued if nothing holds it back."""
    text: str
    """One line without a full stop, in the active language."""
    at: datetime | None = None
    """Since when it waits for this, or the time for which it waits."""
    model: str = ""
    """The row that explains it: the name of its model, and its key."""
    key: int | str = ""


class Service(NamedTuple):
    """The running workers that may take the jobs of a queue."""

    workers: list[WorkerProcess]
    """Those that report the queue."""
    is_served: bool
    """False if no running worker takes its jobs, as far as workers report their queues or have started jobs."""
    has_workers: bool
    """Whether any worker runs."""


def read_reason(job: Job, *, using: str) -> Reason | None:
    """Return why the job waits; None if it runs or has ended."""
    match State(job.state):
        case State.SCHEDULED | State.RETRIES:
            pause = _find_pause(job, using)
            reason = _explain_time(job)
            return reason._replace(text=f"{reason.text}. {pause.text}") if pause else reason
        case State.ENQUEUED:
            return _find_pause(job, using) or _explain_queue(job, using)
        case State.BLOCKED:
            return _find_pause(job, using) or _explain_block(job, using)
    return None


def read_service(queue: str, *, using: str) -> Service:
    """Return the workers of a queue."""
    living = workers.living(conf.get("WORKER_TIMEOUT"))
    running = WorkerProcess.objects.using(using).filter(living, state=WorkerProcess.Phase.RUNNING)
    rows = list(running.order_by("hostname", "pid", "wid")[:MAX_WORKERS])
    own = [row for row in rows if queue in (row.queues or ())]
    is_known = all(row.queues is not None for row in rows)
    return Service(own, bool(own) or (not is_known and _has_started(queue, using)), bool(rows))


def _has_started(queue: str, using: str) -> bool:
    since = timezone.now() - timedelta(seconds=IDLE_S)
    started = Measure.objects.using(using).filter(queue=queue, minute__gt=since, started__gt=0)
    waiting_since = Job.objects.using(using).enqueued().filter(queue=queue, enqueued_at__lt=since)
    return (
        started.exists()
        or Job.objects.using(using).working().filter(queue=queue).exists()
        or not waiting_since.exists()
    )


def _find_pause(job: Job, using: str) -> Reason | None:
    queue = Queue.objects.using(using).filter(name=job.queue, paused_at__isnull=False).first()
    if queue is not None:
        text = gettext("Queue %(name)s is paused since %(time)s %(note)s")
        return Reason("paused-queue", _describe_pause(text, queue, job.queue), queue.paused_at, "queue", job.queue)
    paused = Limit.objects.using(using).filter(scope=Scope.TASK, name=job.jobtype, paused_at__isnull=False)
    limit = paused.first()
    if limit is not None:
        text = gettext("Task %(name)s is paused since %(time)s %(note)s")
        return Reason("paused-task", _describe_pause(text, limit, job.jobtype), limit.paused_at, "limit", limit.pk)
    return None


def _describe_pause(text: str, row: Pausable, name: str) -> str:
    return (text % {"name": name, "time": _format_time(row.paused_at), "note": row.pause_note}).rstrip()


def _explain_time(job: Job) -> Reason:
    at = job.run_at or timezone.now()
    names = {"task": job.jobtype, "time": _format_time(at), "number": job.attempts, "total": job.max_attempts}
    if job.state == State.SCHEDULED and job.errtype == UnknownJobType.__name__:
        names |= {"since": _format_time(job.created_at), "grace": f"{conf.get('UNKNOWN_JOBTYPE_GRACE'):g}"}
        text = gettext(
            "No worker knows task %(task)s (UnknownJobType), since %(since)s; next try at %(time)s. It fails "
            "%(grace)s s after it was due (UNKNOWN_JOBTYPE_GRACE)"
        )
        return Reason("unknown-task", text % names, job.created_at)
    if at < timezone.now() - timedelta(seconds=OVERDUE_S):
        text = gettext("Due since %(time)s, but no node enqueues it: start runfaktory, or read its log")
        return Reason("overdue", text % names, at)
    if job.state == State.RETRIES:
        text = gettext("Attempt %(number)s of %(total)s failed; next attempt at %(time)s")
        return Reason("retry", text % names, at)
    if job.awaited:
        names["signal"] = job.awaited
        text = (
            gettext("Waits for signal %(signal)s")
            if job.due_at is None
            else gettext("Waits for signal %(signal)s until %(time)s")
        )
        return Reason("signal", text % names, job.due_at)
    return Reason("scheduled", gettext("Scheduled for %(time)s") % names, at)


def _explain_queue(job: Job, using: str) -> Reason:
    service = read_service(job.queue, using=using)
    if not service.has_workers:
        return Reason("no-workers", gettext("No worker runs: start manage.py runfaktory"), job.enqueued_at)
    if not service.is_served:
        text = gettext("No running worker takes jobs of queue %(queue)s") % {"queue": job.queue}
        return Reason("unserved-queue", text, job.enqueued_at, "queue", job.queue)
    limiter = Limiter.objects.using(using).filter(scope=Scope.QUEUE, name=job.queue).select_related("limit").first()
    ahead = _count_ahead(job, Job.objects.using(using).enqueued(), using)
    if limiter is not None and (reason := _explain_limiter(limiter, ahead)):
        return reason
    text = gettext("Next in queue %(queue)s")
    if ahead != "0":
        text = gettext("Ahead of it in queue %(queue)s: %(number)s")
    return Reason("queued", text % {"queue": job.queue, "number": ahead}, job.enqueued_at, "queue", job.queue)


def _explain_block(job: Job, using: str) -> Reason:
    blocked = Job.objects.using(using).blocked()
    if job.limiter is not None:
        limiter = Limiter.objects.using(using).filter(pk=job.limiter).select_related("limit").first()
        ahead = _count_ahead(job, blocked.filter(limiter=job.limiter), using)
        if limiter is not None and (reason := _explain_limiter(limiter, ahead)):
            return reason
        text = gettext("Limit of %(name)s: it has room, so the job starts next; ahead: %(number)s")
        return Reason("limit", text % {"name": limiter or "–", "number": ahead}, job.enqueued_at)
    lock = JobLock.objects.using(using).filter(key=job.lock_key).first()
    ahead = _count_ahead(job, blocked.filter(lock_key=job.lock_key), using)
    names = {"key": job.lock_key, "number": ahead}
    if lock is None or lock.expires_at <= timezone.now():
        text = gettext("Lock %(key)s is free, so the next of its jobs starts; ahead: %(number)s")
        return Reason("lock", text % names, job.enqueued_at)
    text = gettext("Lock %(key)s is held by job %(job)s, until %(time)s at least; ahead: %(number)s")
    names |= {"job": lock.jid, "time": _format_time(lock.expires_at)}
    return Reason("lock", text % names, lock.expires_at, "joblock", lock.pk)


def _explain_limiter(limiter: Limiter, ahead: str) -> Reason | None:
    """Return how this limiter holds its jobs back; None if it has room."""
    names = {
        "name": str(limiter), "number": ahead, "used": format_number(limiter.in_use),
        "all": format_number(limiter.concurrency or 0),
    }  # fmt: skip
    place = ("limit", limiter.limit_id)
    if limiter.concurrency is not None and limiter.in_use >= limiter.concurrency:
        text = gettext("Limit of %(name)s: %(used)s of %(all)s running; ahead: %(number)s")
        return Reason("limit", text % names, None, *place)
    if limiter.rate is not None and limiter.opens_at is not None and limiter.opens_at > timezone.now():
        names |= {"rate": rate_text(limiter.rate, limiter.per), "time": _format_time(limiter.opens_at)}
        text = gettext("Limit of %(name)s: %(rate)s; the next jobs start at %(time)s; ahead: %(number)s")
        return Reason("rate", text % names, limiter.opens_at, *place)
    if limiter.is_paused:
        text = gettext("Limit of %(name)s: paused, or its running jobs are counted first; ahead: %(number)s")
        return Reason("limit", text % names, None, *place)
    return None


def _count_ahead(job: Job, jobs: JobQuerySet, using: str) -> str:
    """Count the jobs of the same queue that are claimed before this one, "10,000+" for more."""
    jobs = jobs.filter(queue=job.queue)
    same = jobs.filter(sort_priority=job.sort_priority)
    # Three ranges of the index: one condition with OR would read the queue to its end.
    parts = [
        jobs.filter(sort_priority__lt=job.sort_priority),
        same.filter(enqueued_at__lt=job.enqueued_at),
        same.filter(enqueued_at=job.enqueued_at, pk__lt=job.pk),
    ]
    in_order = [part.order_by("sort_priority", "enqueued_at", "pk") for part in parts]
    count = sum(bounded_counts.counts(in_order, max_count=MAX_AHEAD, using=using))
    return format_number(min(count, MAX_AHEAD), is_more=count >= MAX_AHEAD)


def _format_time(moment: datetime | None) -> str:
    return "–" if moment is None else date_format(timezone.localtime(moment), "Y-m-d H:i:s T", use_l10n=False)
