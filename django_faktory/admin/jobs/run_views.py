"""Admin page *Run a task*: choose a task, fill in its arguments, and enqueue a job."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils import timezone
from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from ...core.json.jsontext import encode
from ...core.payloads import queue_name
from ...errors import FaktoryError
from ...models import Job
from ...models.permissions import may_see
from ...operations.signatures import find_task, find_tasks
from ...tasks import encryption, redaction
from ...tasks.arguments import decode_call
from ...tasks.base import FaktoryTask
from ...tasks.compat import InvalidTask
from ..base import ReadOnlyAdmin, requires_permission
from ..formats import error_text
from ..history import log_action
from ..links import admin_url, page_url, row_link
from .arguments_form import ArgumentsForm
from .detail_views import format_call

_EARLIEST, _LATEST = datetime(1970, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)
"""Times that every database and time zone can represent."""


class OptionsForm(forms.Form):
    """Options of a single job; without a value the task's own option applies."""

    queue = forms.CharField(label=_("Queue"), required=False, max_length=255)
    priority = forms.IntegerField(label=_("Priority"), required=False, min_value=-100, max_value=100)
    run_at = forms.DateTimeField(
        label=_("Run at"),
        required=False,
        widget=forms.DateTimeInput({"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
    )

    def __init__(self, task: FaktoryTask[..., Any], data: Any = None) -> None:
        super().__init__(data, prefix="job")
        zone = timezone.get_current_timezone_name()
        for name, text in (
            ("queue", gettext("Blank: %(value)s") % {"value": task.queue_name}),
            ("priority", gettext("-100 to 100, larger first. Blank: %(value)s") % {"value": task.priority}),
            ("run_at", gettext("In the time zone %(zone)s. Blank: now") % {"zone": zone}),
        ):
            self.fields[name].help_text = text
        self._task = task
        self.task = task

    def clean_queue(self) -> str:
        """Check that the protocol can carry the name."""
        name: str = self.cleaned_data["queue"]
        if name:
            try:
                queue_name(name)
            except FaktoryError as error:
                raise forms.ValidationError(error_text(error)) from error
        return name

    def clean_run_at(self) -> datetime | None:
        """Return the time in UTC."""
        moment: datetime | None = self.cleaned_data["run_at"]
        if moment is None:
            return None
        try:
            moment = moment.astimezone(UTC)
        except (OverflowError, ValueError):
            moment = datetime.max.replace(tzinfo=UTC)
        if not _EARLIEST <= moment <= _LATEST:
            raise forms.ValidationError(gettext("expected a time from 1970 to 9999"))
        return moment

    def clean(self) -> dict[str, Any]:
        """Build the task with these options, in `task`."""
        cleaned: dict[str, Any] = super().clean() or {}
        if not self.errors:
            try:
                self.task = self._task.using(
                    queue_name=cleaned["queue"] or None, priority=cleaned["priority"], run_after=cleaned["run_at"]
                )
            except InvalidTask as error:  # QUEUES of the backend does not have the queue
                self.add_error("queue", error_text(error))
        return cleaned


class RunViews(ReadOnlyAdmin):
    """Mixin for the admin of jobs that adds the page to run a task."""

    has_run_permission = requires_permission("job.add")

    views: ClassVar = {"run/": ("_run", "job_run")}

    def _run(self, request: HttpRequest) -> HttpResponse:
        """Show the form of the chosen task; POST enqueues it."""
        if not self.has_run_permission(request):
            raise PermissionDenied
        tasks = {task.jobtype: task for task in find_tasks()}
        name = request.GET.get("task", "")
        task = tasks.get(name)
        problem = ""
        if name and task is None:
            problem = gettext("No task of this project has the name %(task)s.") % {"task": name[:255]}
        title = gettext("Run a task")
        form = options = None
        if task is not None:
            title = gettext("Run %(task)s") % {"task": task.jobtype}
            data = request.POST if request.method == "POST" else None
            form, options = ArgumentsForm(task, data), OptionsForm(task, data)
            # Both are checked, so that all errors are shown at once.
            if request.method == "POST" and all([form.is_valid(), options.is_valid()]):
                try:
                    return self._enqueue(request, options.task, form)
                except (FaktoryError, TypeError, ValueError) as error:
                    problem = error_text(error)
        back_url = page_url("job_changelist") if may_see(request.user, "job") else admin_url("index")
        return self.page(
            request, "run_task", title=title, task=task,
            tasks=sorted(tasks), form=form, options=options, problem=problem, back_url=back_url,
        )  # fmt: skip

    def _enqueue(self, request: HttpRequest, task: FaktoryTask[..., Any], form: ArgumentsForm) -> HttpResponse:
        args, kwargs = form.args, form.kwargs
        # References become values, which `enqueue` would otherwise wrap as plain dicts.
        decoded = (args, kwargs) if task.plain_json else decode_call(args, kwargs)
        # By its own `enqueue`, so that options, middleware and signals apply as to any other job.
        result = task.enqueue(*decoded[0], **decoded[1])
        job = Job.objects.defer("payload").latest_of(result.id)
        is_hidden = redaction.is_on() or encryption.is_enabled(task.encrypt)
        details = "" if is_hidden else f" with {format_call(encode(args), encode(kwargs))}"
        # A worker may have ended the job already; or the jobs are stored elsewhere.
        row = job or Job(jid=result.id, jobtype=task.jobtype)
        log_action(request, [row], gettext_noop("Enqueued manually") + details)
        text = gettext("Enqueued %(task)s as %(job)s.") % {"task": task.jobtype, "job": result.id}
        self.message_user(request, text, messages.SUCCESS)
        if job is not None and may_see(request.user, "job"):
            return HttpResponseRedirect(row_link("job", job.pk))
        return HttpResponseRedirect(run_link(task.jobtype))


def run_link(task: str = "") -> str:
    """Return the address of the page, with this task chosen."""
    return page_url("job_run", **({"task": task} if task else {}))


def find_run_link(task: str) -> str:
    """Return the address of the page for a task of this project; "" for other tasks."""
    return run_link(task) if find_task(task) is not None else ""
