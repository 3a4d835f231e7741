"""Admin of worker processes in any language: their jobs, and their state.

A worker receives its new state in the reply to its next heartbeat.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from django.contrib import admin
from django.db.models import QuerySet, TextField, Value
from django.db.models.functions import Concat
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.functional import SimpleLazyObject
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from .. import conf
from ..models import Job, WorkerProcess, permissions
from ..store import alarm_records, workers
from .base import ReadOnlyAdmin, requires_permission
from .formats import StrOrPromise, column, format_age, format_number, render_worker, time_column
from .history import log_action
from .labels import PHASES, STATES
from .overview.data import format_memory, is_stale

# A client fetches as many jobs as it likes, so the number of running jobs is not bounded.
RUNS_SHOWN = 100
MAX_LOST_JOBS = 500
"""Jobs of lost workers that the list links to."""
MAX_QUEUES_LENGTH = 60
_COLUMNS = ("jid", "jobtype", "queue", "started_at")


class WorkerProcessAdmin(ReadOnlyAdmin):
    """Admin of worker processes: show them, quiet or terminate them."""

    change_list_template = "admin/django_faktory/workers.html"
    change_form_template = "admin/django_faktory/worker.html"
    gone_because = _("it has stopped, or was lost")
    list_display = ("worker", "marked_state", "jobs", "queues_served", "memory", "started", "last_seen")
    search_fields = ("wid", "hostname")
    ordering = ("-started_at",)
    list_per_page = 50
    actions = ("quiet", "terminate")

    has_quiet_permission = requires_permission("workerprocess.quiet")
    has_terminate_permission = requires_permission("workerprocess.terminate")

    started = time_column("started_at", _("started"))

    def attach(self, request: HttpRequest, rows: list[Any]) -> None:  # noqa: ARG002
        """Add the number of its jobs to each worker."""
        job_counts = workers.count_jobs_of([row.wid for row in rows], using=conf.get("DATABASE"))
        for row in rows:
            row.jobs = job_counts.get(row.wid, 0)

    worker = column(
        lambda worker: render_worker(worker.wid, worker.name),
        _("worker"),
        Concat("hostname", Value(":"), "pid", output_field=TextField()),
    )
    jobs = column(lambda worker: _format_busy(worker, worker.jobs), _("jobs"))
    queues_served = column(
        lambda worker: Truncator(", ".join(worker.queues or ()) or "–").chars(MAX_QUEUES_LENGTH), _("queues")
    )
    memory = column(format_memory, _("memory"), "rss_kb")
    last_seen = column(
        lambda worker: gettext("%(age)s ago") % {"age": format_age(worker.seen_at)}, _("last heartbeat"), "seen_at"
    )

    @admin.display(description=_("state"), ordering="state")
    def marked_state(self, worker: WorkerProcess) -> str:
        """Return the requested state, with a mark if heartbeats are missing."""
        mark = format_html(' <span class="faktory-warn">{}</span>', gettext("no heartbeat")) if is_stale(worker) else ""
        return format_html("{}{}", PHASES[worker.state], mark)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Add the workers that were lost in the last hour, with the jobs that they ran."""
        sees_jobs = permissions.may_see(request.user, "workerprocess", "running")
        lost = SimpleLazyObject(partial(_read_lost, sees_jobs=sees_jobs))
        return super().changelist_view(request, {"lost": lost, "sees_jobs": sees_jobs, **(extra_context or {})})

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Render the worker's page: its jobs and the actions."""
        worker = kwargs.get("obj")
        if worker is not None:
            using = conf.get("DATABASE")
            running = Job.objects.working().filter(wid=worker.wid).order_by("started_at")
            sees_runs = permissions.may_see(request.user, "workerprocess", "running")
            rows = running.only(*_COLUMNS)[:RUNS_SHOWN] if sees_runs else ()
            context |= {
                "sees_runs": sees_runs,
                "phase": PHASES[worker.state],
                "is_stale": is_stale(worker),
                "memory": format_memory(worker),
                "busy": _format_busy(worker, workers.count_jobs_of([worker.wid], using=using).get(worker.wid, 0)),
                "runs": [(job, format_age(job.started_at)) for job in rows if job.started_at],
                "worker_actions": self._possible_actions(request, worker),
            }
        return super().render_change_form(request, context, *args, **kwargs)

    def _possible_actions(self, request: HttpRequest, worker: WorkerProcess) -> list[tuple[str, StrOrPromise, bool]]:
        buttons: list[tuple[str, StrOrPromise, bool]] = []
        # The state only advances: a worker that terminates cannot be quieted.
        if worker.state == WorkerProcess.Phase.RUNNING and self.has_quiet_permission(request):
            buttons.append(("quiet", _("Quiet"), False))
        if worker.state != WorkerProcess.Phase.TERMINATE and self.has_terminate_permission(request):
            buttons.append(("terminate", _("Terminate"), True))
        return buttons

    @admin.action(description=_("Quiet: stop fetching jobs (cannot be undone)"), permissions=["quiet"])
    def quiet(self, request: HttpRequest, queryset: QuerySet[WorkerProcess]) -> None:
        """Quiet the workers: they finish their jobs and fetch none; this cannot be undone."""
        self._advance(request, queryset, "quiet")

    @admin.action(description=_("Terminate: finish and exit"), permissions=["terminate"])
    def terminate(self, request: HttpRequest, queryset: QuerySet[WorkerProcess]) -> HttpResponse | None:
        """Terminate the workers after confirmation: they finish their jobs and exit."""
        note = gettext(
            "They finish running jobs, within SHUTDOWN_TIMEOUT, and exit. runfaktory, systemd or Kubernetes may "
            "restart them."
        )
        confirmation = self.confirmation_page(
            request, gettext("Terminate workers?"), objects=queryset, note=note, button=gettext("Yes, terminate")
        )
        if confirmation is not None:
            return confirmation
        self._advance(request, queryset, "terminate")
        return None

    def _advance(self, request: HttpRequest, queryset: QuerySet[WorkerProcess], state: str) -> None:
        processes = list(queryset)
        # Claims give these workers no job from now on (W15). Workers in a later state stay in it.
        changed = [
            process for process in processes if workers.advance([process.wid], state, using=conf.get("DATABASE"))
        ]
        log_action(request, changed, f"Sent {state}")
        message = ngettext(
            "%(state)s requested for %(number)s worker: it gets no more jobs.",
            "%(state)s requested for %(number)s workers: they get no more jobs.",
            len(changed),
        )
        message %= {"state": PHASES[state], "number": format_number(len(changed))}
        skipped = gettext("%(number)s skipped: already in this state, or stopping.")
        self.report(request, message, len(processes) - len(changed), skipped)


class LostWorker(NamedTuple):
    """A worker that was lost lately."""

    name: SafeString
    at: datetime
    affected: int
    jobs: list[tuple[str, Job | None, str]]
    """Task, row, and state of each job; None and "" if the job is gone."""


def _read_lost(*, sees_jobs: bool) -> list[LostWorker]:
    using = conf.get("DATABASE")
    since = timezone.now() - timedelta(seconds=alarm_records.LOST_SHOWN_S)
    records = alarm_records.read_lost(using=using, since=since)
    jids = [jid for record in records for jid, *_ in record.jobs] if sees_jobs else []
    rows = Job.objects.filter(jid__in=jids[:MAX_LOST_JOBS]).only("jid", "jobtype", "state").order_by("pk")
    row_by_jid = {row.jid: row for row in rows}

    def describe(jid: str, jobtype: str) -> tuple[str, Job | None, str]:
        row = row_by_jid.get(jid)
        return jobtype, row, str(STATES[row.state]) if row else ""

    return [
        LostWorker(
            render_worker(record.subject, record.text),
            record.began_at,
            record.affected,
            [describe(jid, jobtype) for jid, jobtype, _ in record.jobs],
        )
        for record in records
    ]


def _format_busy(worker: WorkerProcess, jobs: int) -> str:
    if worker.threads is None:
        return format_number(jobs)
    numbers = {"jobs": format_number(jobs), "threads": format_number(worker.threads)}
    return gettext("%(jobs)s of %(threads)s") % numbers
