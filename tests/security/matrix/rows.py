"""Create rows in every table, with a marker in each text that requires a permission, and list those permissions."""

import json
from datetime import timedelta

from django_faktory.models import Batch, Job, Limit, OutboxEntry, Tracking
from django_faktory.models.cron import CronRun
from tests.factories import T0, CronFactory, JobFactory, LockFactory, QueueFactory, WorkerFactory
from tests.project.tasks import echo

ROW = 900_001
"""First primary key of these rows, beyond the sequences of any database."""

_JOB = [{"view_job"}]
_CRON = [{"view_cronentry", "view_job"}]
_OUTBOX = [{"view_outboxentry", "view_job"}]
MARKERS = {
    "seen-job-args": _JOB,
    "seen-job-kwargs": _JOB,
    "seen-job-result": _JOB,
    "seen-job-message": _JOB,
    "seen-job-backtrace": _JOB,
    "seen-job-log": _JOB,
    "seen-job-progress": _JOB,
    "seen-job-lock": _JOB,
    "seen-job-task": _JOB,
    "seen-job-about": _JOB,
    "seen-callback-args": [{"view_batch", "view_job"}],
    "seen-callback-task": [{"view_batch", "view_job"}],
    "seen-batch-description": [{"view_batch"}],
    "seen-cron-args": _CRON,
    "seen-cron-kwargs": _CRON,
    "seen-cron-custom": _CRON,
    "seen-cron-note": _CRON,
    "seen-cron-jobtype": [{"view_cronentry"}],
    "seen-outbox-job": _OUTBOX,
    "seen-outbox-error": _OUTBOX,
    "seen-outbox-queue": [{"view_outboxentry"}],
    "seen-lock-key": [{"view_joblock"}],
    "seen-limit-name": [{"view_limit"}],
    "seen-host": [{"view_workerprocess"}],
    "seen-queue": [{"view_queue"}, {"view_statistics"}, {"view_job"}],
}
"""Each marker, with sets of permissions: a user with all permissions of one set may see it."""


def plant():
    """Create one row of each model, in a state to which each action of the matrix applies."""
    _jobs()
    QueueFactory(name="default")
    QueueFactory(name="seen-queue")
    WorkerFactory(wid="w1", hostname="seen-host")
    _batches()
    _cron()
    LockFactory(pk=ROW, key="seen-lock-key")
    Limit.objects.create(pk=ROW, scope="task", name="seen-limit-name", concurrency=5, origin=Limit.Origin.EDITED)
    Limit.objects.create(pk=ROW + 1, scope="task", name="paused", paused_at=T0)
    OutboxEntry.objects.create(
        pk=ROW,
        jid="job-outbox",
        queue="seen-outbox-queue",
        job=json.dumps({"jobtype": "noop", "text": '{"jobtype":"noop","args":["seen-outbox-job"]}'}),
        error="refused: seen-outbox-error",
    )


def _jobs():
    attempt = {
        "wid": "w1",
        "errtype": "Seen",
        "message": "seen-job-message",
        "backtrace": ["seen-job-backtrace"],
        "log": ["seen-job-log"],
        "started_at": "2026-05-01T12:00:00Z",
        "failed_at": "2026-05-01T12:00:01Z",
    }
    text = json.dumps(
        {
            "jid": "job-dead",
            "jobtype": "seen-job-task",
            "queue": "default",
            "args": ["seen-job-args"],
            "custom": {"kwargs": {"seen-job-kwargs": 1}},
        },
        separators=(",", ":"),
    )
    known = {
        "jobtype": "seen-job-task",
        "payload": text,
        "about": "shop.order/seen-job-about",
        "lock_key": "seen-job-lock",
        "errtype": "Seen",
        "history": json.dumps([attempt]),
        "failure": json.dumps(attempt | {"retry_count": 0}),
    }
    JobFactory(
        pk=ROW,
        jid="job-dead",
        dead=True,
        result='"seen-job-result"',
        bid="b-1",
        has_run=True,
        counts_failed=True,
        **known,
    )
    JobFactory(pk=ROW + 1, jid="job-scheduled", scheduled=True, **known)
    JobFactory(pk=ROW + 2, jid="job-ready", **known)
    JobFactory(pk=ROW + 3, jid="job-working", working=True, **known)
    known = {"jobtype": echo.jobtype, "payload": text.replace("seen-job-task", echo.jobtype)}
    JobFactory(pk=ROW + 4, jid="job-known", dead=True, **known)
    Tracking.objects.create(jid="job-dead", percent=1, desc="seen-job-progress", updated_at=T0 + timedelta(days=1))
    Job.objects.filter(pk=ROW).update(created_at=T0)


def _batches():
    callback = '{"jid":"job-callback","jobtype":"seen-callback-task","queue":"default","args":["seen-callback-args"]}'
    fields = {"total": 1, "pending": 1, "failed": 1}
    Batch.objects.create(pk=ROW, bid="b-1", complete=callback, success=callback, committed_at=T0, **fields)
    Batch.objects.create(pk=ROW + 1, bid="b-2", description="seen-batch-description")


def _cron():
    args = {"args": '["seen-cron-args"]', "kwargs": '{"seen-cron-kwargs":1}'}
    CronFactory(pk=ROW, name="nightly", jobtype=echo.jobtype, next_at=T0, origin="admin", **args)
    job = '{"custom":{"word":"seen-cron-custom"}}'
    CronFactory(pk=ROW + 1, name="paused", jobtype="seen-cron-jobtype", paused_at=T0, origin="admin", job=job)
    CronRun.objects.create(entry_id=ROW, tick=T0, outcome="refused", note="TypeError: seen-cron-note")
