"""Admin pages of tasks: number of runs, waiting and run times, errors, limit and cron entries of each task."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any, ClassVar, NamedTuple

from django.contrib import messages
from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.http import urlencode
from django.utils.translation import gettext, gettext_noop, ngettext

from ... import conf
from ...core.histograms import Series
from ...core.limits import Scope
from ...core.payloads import is_storable
from ...models import Limit
from ...models.cron import CronEntry
from ...models.permissions import may, may_see
from ...operations import task_names, timings
from ...operations.alarms import MAX_FAILED_SHARE
from ...operations.error_groups import group_failed
from ...operations.timings import PERIODS, QUEUE, TASK, Period, Timing
from ...store.limits import definitions
from ..base import ReadOnlyAdmin, back_to
from ..formats import StrOrPromise, format_latency, format_number
from ..history import get_reason, log_action, translate_entry
from ..jobs.run_views import find_run_link
from ..links import jobs_link, page_url, row_link
from .charts import Chart, Latencies, LineChart, Mark, Point, build_chart, build_line_chart, build_marks
from .data import FAILED_JOBS_READ

CRON_SHOWN = 5
HISTORY_SHOWN = 20


class TimingLine(NamedTuple):
    """A row of a table of timings."""

    timing: Timing
    link: str
    ended: str
    failed_percent: str
    per_minute: str
    waits: tuple[str, ...]
    runs: tuple[str, ...]
    is_bad: bool
    is_paused: bool = False


class TimingCharts(NamedTuple):
    """Charts of one task or queue over a period."""

    jobs: Chart
    waits: LineChart
    runs: LineChart


def task_link(name: str, period: str = "1h") -> str:
    """Return the address of a task's page."""
    return page_url("task", task=name, period=period)


def read_period(request: HttpRequest) -> Period:
    """Return the chosen period, one hour without a choice."""
    return PERIODS.get(request.GET.get("period", ""), PERIODS["1h"])


def build_line(timing: Timing, link: str, *, is_paused: bool = False) -> TimingLine:
    percent = timing.failed_percent
    return TimingLine(
        timing=timing,
        link=link,
        ended=format_number(timing.ended),
        failed_percent="–" if percent is None else f"{format_number(f'{percent:.{1 if 0 < percent < 10 else 0}f}')} %",
        per_minute=format_number(f"{timing.per_minute:.{'0f' if timing.per_minute >= 10 else '2g'}}"),
        waits=tuple(map(format_latency, timing.waits)),
        runs=tuple(map(format_latency, timing.runs)),
        is_bad=percent is not None and percent > 100 * MAX_FAILED_SHARE,
        is_paused=is_paused,
    )


def build_charts(
    history: Mapping[datetime, Series], period: Period, *, using: str, may_see_workers: bool
) -> TimingCharts:
    """Return the charts of one task or queue, with marks where workers started."""
    intervals = timings.split_intervals(history, period)
    first, interval_s = intervals[0][0], period.interval.total_seconds()
    series = [(_format_interval(at, period), one) for at, one in intervals]
    marks: tuple[Mark, ...] = ()
    if may_see_workers:
        starts = timings.read_deployments(first, using=using)
        marks = build_marks([(at, _describe_start(at, count)) for at, count in starts], first, interval_s)
    jobs = [Point(label, one.succeeded, one.failed) for label, one in series]
    waits = [Latencies(label, *timings.estimate_quantiles(one.waits)) for label, one in series]
    runs = [Latencies(label, *timings.estimate_quantiles(one.runs)) for label, one in series]
    return TimingCharts(
        build_chart(gettext("Finished runs"), jobs, marks),
        build_line_chart(gettext("Waiting time"), waits, marks),
        build_line_chart(gettext("Run time"), runs, marks),
    )


def _format_interval(at: datetime, period: Period) -> str:
    return date_format(at, "j M" if period.interval >= timedelta(days=1) else "H:i")


def _describe_start(at: datetime, count: int) -> str:
    text = ngettext("%(time)s: %(number)s worker started", "%(time)s: %(number)s workers started", count)
    return text % {"time": date_format(timezone.localtime(at), "Y-m-d H:i"), "number": format_number(count)}


class TaskViews(ReadOnlyAdmin):
    """Mixin for the overview's admin that adds the pages of tasks."""

    views: ClassVar = {
        "tasks/": ("_tasks", "tasks"),
        "tasks/one/": ("_task", "task"),
        "tasks/pause/": ("_pause_or_resume", "task_pause"),
    }

    def _tasks(self, request: HttpRequest) -> HttpResponse:
        """Show the timings of all tasks and all queues."""
        self._require_permission(request)
        using, period = conf.get("DATABASE"), read_period(request)
        paused = set(definitions.paused_tasks(using=using))
        by_task = timings.read_table(TASK, period, using=using)
        by_queue = timings.read_table(QUEUE, period, using=using)
        return self.page(
            request,
            "tasks",
            title=gettext("Tasks"),
            period=period,
            periods=build_period_tabs(period),
            tasks=[build_line(one, task_link(one.name, period.name), is_paused=one.name in paused) for one in by_task],
            queues=[build_line(one, row_link("queue", one.name)) for one in by_queue],
            idle_tasks=[
                (name, task_link(name, period.name))
                for name in sorted(task_names.known_tasks(using=using) - {one.name for one in by_task})
            ],
        )

    def _task(self, request: HttpRequest) -> HttpResponse:
        """Show one task: timings in each period, charts, errors, its limit, its cron entries."""
        self._require_permission(request)
        using, period, name = conf.get("DATABASE"), read_period(request), _read_name(request.GET.get("task", ""))
        sees_limits = may(request.user, "limit.view")
        limit = Limit.objects.filter(scope=Scope.TASK, name=name).first() if sees_limits else None
        # The longest period includes the others.
        history = timings.read_history(name, TASK, PERIODS["30d"], using=using)
        totals = [(one, build_line(timings.build_total(name, history, one), "")) for one in PERIODS.values()]
        groups = group_failed(using=using, limit=FAILED_JOBS_READ).groups
        return self.page(
            request,
            "task",
            title=name,
            task=name,
            period=period,
            periods=build_period_tabs(period, task=name),
            totals=totals,
            charts=build_charts(
                history, period, using=using, may_see_workers=may_see(request.user, "overview", "workers")
            ),
            errors=[group for group in groups if group.kind.jobtype == name],
            failed_jobs_read=FAILED_JOBS_READ,
            sees_limits=sees_limits,
            limit=limit,
            history=_read_history(name, limit) if sees_limits else None,
            may_pause=may(request.user, "limit.pause"),
            may_resume=may(request.user, "limit.resume"),
            entries=_read_entries(name) if may(request.user, "cronentry.view") else None,
            jobs_url=jobs_link(q=f'task:"{name}"'),
            run_url=find_run_link(name) if may(request.user, "job.add") else "",
        )

    def _pause_or_resume(self, request: HttpRequest) -> HttpResponse:
        """Pause or resume the task of the form. POST only."""
        if request.method != "POST":
            return self.answer_get(request, page_url("tasks"))
        name, verb = _read_name(request.POST.get("task", "")), request.POST.get("verb", "")
        if verb not in ("pause", "resume") or not may(request.user, f"limit.{verb}"):
            raise PermissionDenied
        using = conf.get("DATABASE")
        before = Limit.objects.filter(scope=Scope.TASK, name=name).first()
        author = partial(definitions.pause, by=request.user.get_username(), reason=get_reason(request))
        changed = (author if verb == "pause" else definitions.resume)([name], using=using)
        # A limit that was only a pause is deleted by the resume: the row before is logged.
        row = Limit.objects.filter(scope=Scope.TASK, name=name).first() or before
        done = gettext_noop("Paused") if verb == "pause" else gettext_noop("Resumed")
        if changed and row is not None:
            log_action(request, [row], done, name=name)
            text = gettext("Task %(task)s is resumed.")
            if verb == "pause":
                text = gettext("Task %(task)s is paused: its jobs wait.")
            self.message_user(request, text % {"task": name}, messages.SUCCESS)
        else:
            text = gettext("Nothing done: %(task)s was paused already.")
            if verb == "resume":
                text = gettext("Nothing done: %(task)s was not paused.")
            self.message_user(request, text % {"task": name}, messages.WARNING)
        overview_url = page_url("overview_changelist")
        return back_to(request, task_link(name) if self._may_see_tasks(request) else overview_url)

    def _may_see_tasks(self, request: HttpRequest) -> bool:
        return may_see(request.user, "overview", "tasks")

    def _require_permission(self, request: HttpRequest) -> None:
        if not self._may_see_tasks(request):
            raise PermissionDenied


def _read_name(text: str) -> str:
    if not text or not is_storable(text):
        raise Http404
    return text


def build_period_tabs(period: Period, **parameters: str) -> list[tuple[StrOrPromise, str, bool]]:
    """Return label and address of each period, and whether it is the chosen one."""
    return [(one.label, f"?{urlencode({**parameters, 'period': one.name})}", one is period) for one in PERIODS.values()]


def _read_history(name: str, limit: Limit | None) -> list[LogEntry]:
    """Return the latest log entries about a task's limit and its pauses, newest first."""
    # A limit that is only a pause is deleted by the resume: its entries are found by the name of the task.
    pauses = Q(object_repr=name[:200]) & (
        Q(change_message__startswith="Paused") | Q(change_message__startswith="Resumed")
    )
    of_row = Q(object_id=str(limit.pk)) if limit else Q()
    entries = LogEntry.objects.filter(of_row | pauses, content_type=ContentType.objects.get_for_model(Limit))
    latest = list(entries.select_related("user").order_by("-action_time", "-pk")[:HISTORY_SHOWN])
    for entry in latest:
        entry.change_message = translate_entry(entry.get_change_message())
    return latest


def _read_entries(name: str) -> list[Any]:
    entries = CronEntry.objects.filter(jobtype=name, removed_at=None).order_by("next_at", "name")
    return list(entries.only("name", "schedule", "next_at", "paused_at", "zone")[:CRON_SHOWN])
