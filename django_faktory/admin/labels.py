"""Labels of the admin in the language of the reader: states, and the names of models and their fields.

The names are set here and not in the models: `verbose_name` would be a part of the migrations.
"""

from __future__ import annotations

from collections.abc import Mapping

from django.db.models import Model
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from ..core.cron import RunOutcome
from ..core.lifecycle import State
from ..models import Batch, Job, JobLock, Limit, OutboxEntry, Queue, WorkerProcess
from ..models.cron import CronEntry
from ..models.proxies import GearMonkeyFunction, Overview
from .formats import StrOrPromise

STATES: Mapping[str, StrOrPromise] = {
    State.SCHEDULED: pgettext_lazy("state of a job", "scheduled"),
    State.ENQUEUED: pgettext_lazy("state of a job", "enqueued"),
    State.BLOCKED: pgettext_lazy("state of a job", "blocked"),
    State.WORKING: pgettext_lazy("state of a job", "working"),
    State.RETRIES: pgettext_lazy("state of a job", "retries"),
    State.DEAD: pgettext_lazy("state of a job", "dead"),
    State.SUCCEEDED: pgettext_lazy("state of a job", "succeeded"),
    State.DISCARDED: pgettext_lazy("state of a job", "discarded"),
    State.EXPIRED: pgettext_lazy("state of a job", "expired"),
}

PHASES: Mapping[str, StrOrPromise] = {
    WorkerProcess.Phase.RUNNING: pgettext_lazy("state of a worker", "running"),
    WorkerProcess.Phase.QUIET: pgettext_lazy("state of a worker", "quiet"),
    WorkerProcess.Phase.TERMINATE: pgettext_lazy("state of a worker", "terminate"),
}

CRON_STATES: Mapping[str, StrOrPromise] = {
    "active": pgettext_lazy("state of a cron entry", "active"),
    "paused": pgettext_lazy("state of a cron entry", "paused"),
    "removed": pgettext_lazy("state of a cron entry", "removed from code"),
    "never": pgettext_lazy("state of a cron entry", "never runs"),
}

OUTCOMES: Mapping[str, StrOrPromise] = {
    RunOutcome.ENQUEUED: pgettext_lazy("result of a cron run", "enqueued"),
    RunOutcome.SUCCEEDED: pgettext_lazy("result of a cron run", "succeeded"),
    RunOutcome.DEAD: pgettext_lazy("result of a cron run", "dead"),
    RunOutcome.DISCARDED: pgettext_lazy("result of a cron run", "discarded"),
    RunOutcome.EXPIRED: pgettext_lazy("result of a cron run", "expired"),
    RunOutcome.GONE: pgettext_lazy("result of a cron run", "gone"),
    RunOutcome.MISSED: pgettext_lazy("result of a cron run", "missed"),
    RunOutcome.OVERLAPPED: pgettext_lazy("result of a cron run", "overlapped"),
    RunOutcome.REFUSED: pgettext_lazy("result of a cron run", "refused"),
}

_MODELS: Mapping[type[Model], tuple[StrOrPromise, StrOrPromise]] = {
    Overview: (_("overview"), _("overview")),
    Job: (_("job"), _("jobs")),
    Queue: (_("queue"), _("queues")),
    WorkerProcess: (_("worker"), _("workers")),
    Batch: (_("batch"), _("batches")),
    CronEntry: (_("cron entry"), _("cron entries")),
    Limit: (_("limit"), _("limits")),
    JobLock: (_("lock"), _("locks")),
    OutboxEntry: (_("outbox entry"), _("outbox")),
    GearMonkeyFunction: (_("GearMonkey function"), _("GearMonkey functions")),
}

_FIELDS: Mapping[type[Model], Mapping[str, StrOrPromise]] = {
    Job: {"queue": _("queue")},
    Queue: {"name": _("name")},
    WorkerProcess: {"hostname": _("host"), "pid": _("process ID")},
    Batch: {
        "bid": _("batch ID"),
        "total": _("jobs"),
        "pending": _("not ended"),
        "unrun": _("never executed"),
        "failed": _("failed"),
        "is_broken": _("cannot succeed"),
        "children": _("nested batches"),
        "open_children": _("nested batches not ended"),
        "unsucceeded_children": _("nested batches without success"),
    },
    CronEntry: {
        "name": _("name"),
        "origin": _("origin"),
        "schedule": _("schedule"),
        "zone": _("time zone"),
        "jobtype": _("task"),
        "queue": _("queue"),
        "args": _("arguments"),
        "kwargs": _("keyword arguments"),
        "job": _("job options"),
        "missed": _("if runs were missed"),
        "window_s": _("how far back to look"),
        "overlap": _("overlapping runs"),
    },
    Limit: {
        "scope": _("scope"),
        "name": _("name"),
        "concurrency": _("jobs at a time"),
        "burst": _("largest burst"),
        "origin": _("origin"),
        "paused_at": _("paused"),
    },
    JobLock: {"key": _("key"), "attempt": _("attempt"), "wid": _("worker ID"), "lease": _("lease")},
    OutboxEntry: {"queue": _("queue"), "error": _("error")},
}


def install() -> None:
    """Set the names of models and fields that Django's pages show. Permissions that exist keep their names."""
    for model, (singular, plural) in _MODELS.items():
        model._meta.verbose_name, model._meta.verbose_name_plural = singular, plural  # noqa: SLF001  (documented)
    for model, names in _FIELDS.items():
        for field, name in names.items():
            model._meta.get_field(field).verbose_name = name  # type: ignore[union-attr]  # noqa: SLF001
