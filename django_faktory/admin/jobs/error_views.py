"""Admin views of dead jobs by error: all groups, one group, and a test of one job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import Max
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils import timezone
from django.utils.translation import gettext, gettext_noop, ngettext

from ... import conf
from ...core.json import jsontext
from ...core.lifecycle import State
from ...core.queries import LATEST_FAILURE
from ...errors import InvalidPayload
from ...models import Job
from ...models.permissions import may
from ...operations import bulk, error_groups, job_summaries
from ...operations.error_groups import FailureKind
from ...operations.job_actions import JOB_ACTIONS, Verb
from ...operations.timings import PERIODS
from ...store import texts
from ..base import ReadOnlyAdmin
from ..history import log_action
from ..labels import STATES
from ..links import jobs_link, page_url, row_link
from ..lists import format_capped
from ..overview.charts import Chart, Point, build_chart
from .bulk_views import COUNTED

JOBS_SHOWN = 20
GROUPS_SHOWN = 200
RETRIES_COUNTED = 1000
CHARTED = 5000
"""Dead jobs of a group, the latest ones, that its chart counts."""
FAILURE_SHOWN = 50_000
"""Characters of the newest failure that the page of a group reads."""
REFRESHED_EVERY_S = 1


class ErrorViews(ReadOnlyAdmin):
    """Mixin for the admin of jobs that adds the error pages."""

    views: ClassVar = {
        "errors/": ("_errors", "job_errors"),
        "errors/one/": ("_error", "job_error"),
        "errors/tried/": ("_test_part", "job_tried"),
        "<int:pk>/try/": ("_test", "job_try"),
    }

    def _errors(self, request: HttpRequest) -> HttpResponse:
        self._require_view_permission(request)
        groups = error_groups.group_failed(using=conf.get("DATABASE"))
        return self.page(
            request,
            "errors",
            title=gettext("Failed jobs by error"),
            groups=groups,
            shown_groups=groups.groups[:GROUPS_SHOWN],
        )

    def _error(self, request: HttpRequest) -> HttpResponse:
        """Show a group: a test of one job, actions on all, the latest traceback and the latest jobs."""
        self._require_view_permission(request)
        using, kind = conf.get("DATABASE"), _parse_kind(request)
        # The place is not a column: read the newest ids and compare the places of their jobs.
        dead = error_groups.filter_kind(kind, using=using).order_by(*LATEST_FAILURE)
        ids = error_groups.ids_of_kind(dead[: COUNTED + 1], kind)
        latest = _read_jobs(ids[:JOBS_SHOWN])
        retrying = error_groups.filter_kind(kind, using=using, state=State.RETRIES)
        retrying_ids = error_groups.ids_of_kind(retrying.order_by(*LATEST_FAILURE)[: RETRIES_COUNTED + 1], kind)
        failed = latest or _read_jobs(retrying_ids[:JOBS_SHOWN])
        retry = JOB_ACTIONS[Verb.RETRY]
        count_text = format_capped(len(ids), COUNTED)
        return self.page(
            request,
            "error",
            title=ngettext("%(error)s: %(number)s dead job", "%(error)s: %(number)s dead jobs", len(ids))
            % {"error": kind.errtype or gettext("Killed manually"), "number": count_text},
            chart=_build_chart(ids) if ids else None,
            last_retry_at=Job.objects.filter(pk__in=retrying_ids).aggregate(at=Max("run_at"))["at"],
            may_kill=JOB_ACTIONS[Verb.KILL].is_allowed(request.user),
            kind=kind,
            count=len(ids),
            count_text=count_text,
            latest=latest,
            summaries=[
                (job, job_summaries.describe_call(job, job_summaries.ON_PAGES), job_summaries.read_message(job))
                for job in latest
            ],
            failure=_read_latest_failure(failed),
            releases=", ".join(error_groups.read_releases([job.pk for job in failed], using=using)),
            retrying=format_capped(len(retrying_ids), RETRIES_COUNTED),
            retrying_url=jobs_link(state="retries", q=f'error:"{kind.errtype}" task:"{kind.jobtype}"'),
            may_retry=retry.is_allowed(request.user),
            may_edit=may(request.user, "job.change"),
            may_discard=JOB_ACTIONS[Verb.DISCARD].is_allowed(request.user),
            test=self._read_test(request),
            every_s=REFRESHED_EVERY_S,
        )

    def _test(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Retry one job; the redirect leads to its group's page, which shows how it ends."""
        if request.method != "POST":
            return self.answer_get(request, row_link("job", pk))
        self._require_view_permission(request)  # the redirect's URL contains the job's error
        if not JOB_ACTIONS[Verb.RETRY].is_allowed(request.user):
            raise PermissionDenied
        job = Job.objects.defer(*self.long_texts).filter(pk=pk).first()
        if job is None:
            return self.answer_missing(request)
        kind = error_groups.read_kind(job)  # before the retry: the next run may replace the failure
        if bulk.test_one(job):
            log_action(request, [job], gettext_noop("Retried as a test"))
        else:
            text = gettext("Nothing done: the job is now %(state)s.") % {"state": STATES[job.state]}
            self.message_user(request, text, messages.WARNING)
        return HttpResponseRedirect(f"{page_url('job_error')}?{kind.query}&tried={pk}")

    def _test_part(self, request: HttpRequest) -> HttpResponse:
        """Render the part of the page that is reloaded until the tested job has ended."""
        self._require_view_permission(request)
        return self.page(
            request, "test_result", shows_navigation=False, test=self._read_test(request), kind=_parse_kind(request)
        )

    def _read_test(self, request: HttpRequest) -> dict[str, Any] | None:
        """Return the state of the job that was tested; None if none was."""
        pk = request.GET.get("tried", "")
        # At most 18 digits: larger numbers do not fit the database's integer.
        if not pk.isdecimal() or len(pk) > 18:
            return None
        columns = ("jid", "jobtype", "state", "errtype", "finished_at")
        job = Job.objects.filter(pk=int(pk)).only(*columns).first()
        state = job.state if job else None
        return {
            "pk": pk,
            "job": job,
            "state": STATES[state] if state else "",
            "part": f"{page_url('job_tried')}?{request.GET.urlencode()}",
            "is_good": state == State.SUCCEEDED,
            "is_bad": state in (State.DEAD, State.RETRIES),
            # None: the row has been deleted, so no further state will follow.
            "is_over": state in (State.SUCCEEDED, State.DEAD, State.RETRIES, State.DISCARDED, State.EXPIRED, None),
            "message": error_groups.extract_message(_read_failure(job, error_groups.BEGINNING)) if job else "",
        }

    def _require_view_permission(self, request: HttpRequest) -> None:
        if not self.has_view_permission(request):
            raise PermissionDenied


def _build_chart(ids: Sequence[int]) -> Chart:
    """Return the deaths of these jobs over the last day, by the hour."""
    intervals = PERIODS["24h"].starts(timezone.now())
    times = Job.objects.filter(pk__in=ids[:CHARTED], finished_at__gte=intervals[0])
    ends = times.values_list("finished_at", flat=True)
    counts = Counter((at - intervals[0]) // timedelta(hours=1) for at in ends if at is not None)
    points = [Point(f"{at:%H:%M}", 0, counts[index]) for index, at in enumerate(intervals)]
    return build_chart(gettext("Failed finally in the last 24 hours"), points)


def _read_jobs(ids: Sequence[int]) -> list[Any]:
    """Return these jobs with the beginnings of their arguments and failures, the latest failure first."""
    columns = ("jid", "jobtype", "queue", "state", "failures", "losses", "finished_at", "failed_at", "about")
    jobs = Job.objects.filter(pk__in=ids).order_by(*LATEST_FAILURE)
    return list(job_summaries.with_texts(jobs, job_summaries.ON_PAGES).only(*columns))


def _read_failure(job: Job, length: int) -> str:
    return texts.read_beginnings(job, {"failure": length})["failure"]


def _read_latest_failure(jobs: Sequence[Job]) -> dict[str, str] | None:
    """Return message and traceback of the newest job, as far as they fit into `FAILURE_SHOWN` characters."""
    if not jobs:
        return None
    text = _read_failure(jobs[0], FAILURE_SHOWN)
    lines: list[str] = []
    # A text that was cut off, or that a client wrote, may be no JSON object.
    with suppress(InvalidPayload):
        members = jsontext.decode(text)
        lines = members.get("backtrace") or [] if isinstance(members, dict) else []
    traceback = "\n".join(str(line) for line in lines) if isinstance(lines, list) else ""
    return {
        "message": error_groups.extract_message(text),
        "traceback": error_groups.replace_unsendable(traceback),
    }


def _parse_kind(request: HttpRequest) -> FailureKind:
    return FailureKind(request.GET.get("error", ""), request.GET.get("task", ""), request.GET.get("at", ""))
