"""Admin views of one job: its page, the actions on it, editing its arguments, and downloads of its long texts."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, ClassVar

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ... import conf
from ...core.json.jsontext import compact, decode, encode
from ...errors import FaktoryError, InvalidPayload
from ...models import Job
from ...models.permissions import may_see
from ...operations import bulk, edit, signals
from ...operations.job_actions import CLEAR, JOB_ACTIONS
from ...operations.signatures import bind, find_task
from ...store import texts
from ...tasks import redaction
from ...tasks.encryption import is_encrypted
from ..base import SAFE_METHODS, ReadOnlyAdmin, requires_permission
from ..formats import error_text
from ..history import log_action
from ..links import page_url, row_link
from ..long_texts import LongText
from . import detail
from .arguments_form import ArgumentsForm

REFRESHED_EVERY_S = 2
LOGGED_BYTES = 500
"""Length of the arguments, before and after an edit, that the history keeps."""


class JobViews(ReadOnlyAdmin):
    """Mixin for the admin of jobs that adds the job's page and its actions."""

    gone_because = _("it has ended, and its result was deleted after RESULT_TTL, or was not kept")
    change_form_template = "admin/django_faktory/job.html"
    long_texts: ClassVar = {
        "payload": LongText(redact=lambda job, text: redaction.redact_job(job.jobtype, text)),
        "result": LongText(),
        "history": LongText(redact=lambda job, text: redaction.redact_history(job.jobtype, text)),
        "failure": LongText(),
    }
    has_edit_permission = requires_permission("job.change")
    has_signal_permission = requires_permission("job.signal")

    views: ClassVar = {
        "<int:pk>/act/<str:verb>/": ("_execute_one", "job_act"),
        "<int:pk>/edit/": ("_edit", "job_edit"),
        "<int:pk>/signal/": ("_signal", "job_signal"),
        "<int:pk>/part/": ("_part", "job_part"),
    }

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Render the job's page; it does not use a Django form."""
        job = kwargs.get("obj")
        page_context = {} if job is None else self._build_context(request, job)
        return super().render_change_form(request, {**context, **page_context}, *args, **kwargs)

    def _build_context(self, request: HttpRequest, job: Job) -> dict[str, Any]:
        # Read separately from the row, and cut by the database: a job may have 16 MiB of arguments.
        stored = texts.read(job, *self.long_texts)
        payload = stored["payload"]
        stored["payload"] = self.redact_stored(job, "payload", payload)
        urls = {column: self.download_url(job, column) for column in self.long_texts}
        return {
            **detail.build_context(job, stored, urls, request),
            "arguments": detail.name_arguments(job, payload, stored["payload"]),
            "part_url": page_url("job_part", job.pk),
            "every_s": REFRESHED_EVERY_S,
        }

    def _part(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Render the part of the job's page that is reloaded until the job has ended."""
        if request.method not in SAFE_METHODS:
            return HttpResponseNotAllowed(SAFE_METHODS)
        if not may_see(request.user, "job"):
            raise PermissionDenied
        job = get_object_or_404(Job.objects.defer(*self.long_texts), pk=pk)
        return self.page(request, "job_body", shows_navigation=False, **self._build_context(request, job))

    def _execute_one(self, request: HttpRequest, pk: int, verb: str) -> HttpResponse:
        if request.method != "POST":
            return self.answer_get(request, row_link("job", pk))
        action = JOB_ACTIONS.get(verb)
        # "clear" acts on a queue and is no action on one job.
        if action is None or verb == CLEAR or not action.is_allowed(request.user) or not may_see(request.user, "job"):
            raise PermissionDenied
        # The long texts can be large, and the action needs none of them.
        job = Job.objects.defer(*self.long_texts).filter(pk=pk).first()
        if job is None:
            return self.answer_missing(request)
        if action.warning:
            confirmation = self.confirmation_page(
                request,
                gettext("%(action)s this job?") % {"action": action.label},
                objects=[job],
                note=action.warning,
                button=gettext("Yes, %(action)s") % {"action": str(action.label).lower()},
            )
            if confirmation is not None:
                return confirmation
        changed = bulk.execute(verb, Job.objects.filter(pk=job.pk))
        if changed:
            log_action(request, [job], action.done_label)
            self.message_user(request, f"{action.done_label}: {job.jid}", messages.SUCCESS)
        else:
            text = gettext("%(action)s: nothing done, the job has changed its state meanwhile.")
            self.message_user(request, text % {"action": action.label}, messages.WARNING)
        # A deleted job has no page to return to.
        still_exists = Job.objects.filter(pk=pk).exists()
        return HttpResponseRedirect(row_link("job", pk) if still_exists else page_url("job_changelist"))

    def _edit(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Show the arguments; POST replaces them."""
        # The form shows the arguments, so editing alone does not suffice (ADR 0034).
        if not self.has_edit_permission(request) or not may_see(request.user, "job"):
            raise PermissionDenied
        job = Job.objects.defer(*self.long_texts).filter(pk=pk).first()
        if job is None:
            return self.answer_missing(request)
        args, kwargs, problem = detail.read_editable_call(job, texts.read(job, "payload")["payload"])
        seen = _fingerprint(args, kwargs)
        form = None if problem else _build_form(request, job, args, kwargs)
        if request.method == "POST" and not problem:
            try:
                _refuse_stale(request, seen, has_form=form is not None)
                changes = _read_changes(request, form)
                if changes is not None:
                    edit.edit(job.jid, changes, using=conf.get("DATABASE"))
                    return self._finish_edit(request, job, format_call(args, kwargs), changes)
            except FaktoryError as error:
                problem = error_text(error)
            # The form shows the same texts again if they are refused, so that no input is lost.
            args, kwargs = request.POST.get("args", args), request.POST.get("kwargs", kwargs)
        title = gettext("Edit the arguments of %(task)s") % {"task": job.jobtype}
        return self.page(
            request, "edit_job", title=title, job=job, args=args, kwargs=kwargs,
            problem=problem, form=form, seen=seen, back_url=row_link("job", pk),
        )  # fmt: skip

    def _signal(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Show a form for a signal to the job; POST sends it."""
        if not self.has_signal_permission(request) or not may_see(request.user, "job"):
            raise PermissionDenied
        job = Job.objects.filter(pk=pk).first()
        if job is None:
            return self.answer_missing(request)
        name, payload, problem = request.POST.get("name", job.awaited), request.POST.get("payload", ""), ""
        if request.method == "POST":
            try:
                signals.send(job, name, decode(payload or "null"))
            except FaktoryError as error:
                problem = error_text(error)
            else:
                log_action(request, [job], f"Sent signal {name}")
                self.message_user(request, gettext("Signal sent."), messages.SUCCESS)
                return HttpResponseRedirect(row_link("job", pk))
        title = gettext("Send a signal to %(task)s") % {"task": job.jobtype}
        return self.page(
            request,
            "signal_job",
            title=title,
            signal=name,
            payload=payload,
            problem=problem,
            back_url=row_link("job", pk),
        )

    def _finish_edit(self, request: HttpRequest, job: Job, before: str, changes: edit.Changes) -> HttpResponse:
        after = format_call(encode(changes.args), encode(changes.kwargs))
        # Hidden arguments must not be in the log either.
        details = "" if redaction.is_on() else f" from {before} to {after}"
        log_action(request, [job], f"Edited its arguments{details}")
        self.message_user(request, gettext("Arguments saved. The job has not been retried."), messages.SUCCESS)
        return HttpResponseRedirect(row_link("job", job.pk))


def _build_form(request: HttpRequest, job: Job, args: str, kwargs: str) -> ArgumentsForm | None:
    """Return the form with a field for each parameter; None if the user or the job needs a form for JSON."""
    if "args" in request.POST or request.GET.get("as") == "json":
        return None
    task, stored = find_task(job.jobtype), (decode(args), decode(kwargs))
    if task is None or not isinstance(stored[0], list) or is_encrypted(stored[0]) or bind(task, *stored) is None:
        return None
    return ArgumentsForm(task, request.POST if request.method == "POST" else None, stored=stored)


def _read_changes(request: HttpRequest, form: ArgumentsForm | None) -> edit.Changes | None:
    """Return the submitted arguments; None if the form shows errors. Raises InvalidPayload, which names the field."""
    if form is not None:
        return edit.Changes(form.args, form.kwargs) if form.is_valid() else None
    return _parse_changes(request.POST["args"], request.POST.get("kwargs", "") or "{}")


def _fingerprint(args: str, kwargs: str) -> str:
    return sha256(f"{args}\0{kwargs}".encode("utf-8", "surrogatepass")).hexdigest()


def _refuse_stale(request: HttpRequest, seen: str, *, has_form: bool) -> None:
    """Raise InvalidPayload if the user has not seen the present arguments, or the form no longer fits."""
    if request.POST.get("seen", seen) != seen:
        raise InvalidPayload(
            gettext("The arguments were changed meanwhile. Compare yours with the job; Save replaces them.")
        )
    if not has_form and "args" not in request.POST:
        raise InvalidPayload(gettext("The task has changed meanwhile. Edit the arguments as JSON."))


def format_call(args: str, kwargs: str) -> str:
    """Return arguments as one short line of JSON."""
    named = "" if decode(kwargs or "{}") == {} else f" {compact(kwargs)}"
    return texts.cut(f"{compact(args)}{named}", LOGGED_BYTES)


def _parse_changes(args: str, kwargs: str) -> edit.Changes:
    """Parse the submitted arguments. Raises InvalidPayload, which names the field."""
    arguments: dict[str, Any] = {}
    for name, text, expected_type, problem in (
        ("args", args, list, gettext("expected a JSON array")),
        ("kwargs", kwargs, dict, gettext("expected a JSON object")),
    ):
        try:
            arguments[name] = decode(text)
        except InvalidPayload as error:
            raise InvalidPayload("%(field)s: %(problem)s", field=name, problem=error) from None
        if not isinstance(arguments[name], expected_type):
            raise InvalidPayload("%(field)s: %(problem)s", field=name, problem=problem)
    return edit.Changes(**arguments)
