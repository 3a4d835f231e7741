"""Admin views of one job: its page, the actions on it, editing its arguments, and downloads of its long texts."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.shortcuts import get_object_or_404
from django.urls import URLPattern, path, reverse

from ... import conf
from ...core.json.jsontext import decode
from ...errors import FaktoryError, InvalidPayload
from ...models import Job
from ...models.permissions import may_see
from ...operations import edit
from ...store import texts
from ...tasks import redaction
from ..base import LongText, ReadOnlyAdmin, log_action, requires_permission
from . import actions, detail


class JobViews(ReadOnlyAdmin):
    """Mixin for the admin of jobs that adds the job's page and its actions."""

    change_form_template = "admin/django_faktory/job.html"
    long_texts: ClassVar = {
        "payload": LongText(redact=lambda job, text: redaction.shown_job(job.jobtype, text)),
        "result": LongText(),
        "history": LongText(),
        "failure": LongText(),
    }
    has_edit_permission = requires_permission("job.change")

    def get_urls(self) -> list[URLPattern]:
        """Return the URLs, those of actions and editing first."""
        wrap = self.admin_site.admin_view
        return [
            path("<int:pk>/act/<str:verb>/", wrap(self._act_on_one), name="django_faktory_job_act"),
            path("<int:pk>/edit/", wrap(self._edit), name="django_faktory_job_edit"),
            *super().get_urls(),
        ]

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Render the job's page; it does not use a Django form."""
        job = kwargs.get("obj")
        more = {}
        if job is not None:
            stored = texts.read(job, *self.long_texts)
            stored["payload"] = self.seen_of(job, "payload", stored["payload"])
            urls = {column: self.url_of_download(job, column) for column in self.long_texts}
            more = detail.context(job, stored, urls, request)
        return super().render_change_form(request, {**context, **more}, *args, **kwargs)

    def _act_on_one(self, request: HttpRequest, pk: int, verb: str) -> HttpResponse:
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        act = actions.ACTS.get(verb)
        # "clear" acts on a queue and is no action on one job.
        if act is None or verb == "clear" or not act.is_allowed(request) or not may_see(request.user, "job"):
            raise PermissionDenied
        # The long texts can be large, and the action needs none of them.
        job = get_object_or_404(Job.objects.using(conf.get("DATABASE")).defer(*self.long_texts), pk=pk)
        if act.warning:
            asked = self.confirmed(
                request, f"{act.label} this job?", what=[job], note=act.warning, button=f"Yes, {act.label.lower()}"
            )
            if asked is not None:
                return asked
        changed = actions.execute(verb, [job.pk], using=conf.get("DATABASE"))
        if changed:
            log_action(request, [job], act.done)
            self.message_user(request, f"{act.done}: {job.jid}", messages.SUCCESS)
        else:
            self.message_user(
                request, f"{act.label}: the job has left the state for it; nothing was done.", messages.WARNING
            )
        # A deleted job has no page to return to.
        is_there = Job.objects.using(conf.get("DATABASE")).filter(pk=pk).exists()
        return HttpResponseRedirect(_page(pk) if is_there else reverse("admin:django_faktory_job_changelist"))

    def _edit(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Show the arguments; POST replaces them."""
        if not self.has_edit_permission(request) or not may_see(request.user, "job"):
            raise PermissionDenied
        job = get_object_or_404(Job.objects.using(conf.get("DATABASE")).defer(*self.long_texts), pk=pk)
        args, kwargs, trouble = detail.editable_call(job, texts.read(job, "payload")["payload"])
        if request.method == "POST" and not trouble:
            args, kwargs = request.POST.get("args", ""), request.POST.get("kwargs", "") or "{}"
            try:
                edit.edit(job.jid, _changes(args, kwargs), using=conf.get("DATABASE"))
            except FaktoryError as error:
                trouble = str(error)
            else:
                log_action(request, [job], "Edited its arguments")
                self.message_user(request, "It has other arguments now.", messages.SUCCESS)
                return HttpResponseRedirect(_page(pk))
        return self.page(
            request, "edit_job", title=f"Edit the arguments of {job.jobtype}", job=job, args=args, kwargs=kwargs,
            trouble=trouble, back=_page(pk),
        )  # fmt: skip


def _changes(args: str, kwargs: str) -> edit.Changes:
    """Parse the submitted arguments. Raises InvalidPayload, which names the field."""
    found: dict[str, Any] = {}
    for name, text, kind, json_type in (("args", args, list, "array"), ("kwargs", kwargs, dict, "object")):
        try:
            found[name] = decode(text)
        except InvalidPayload as error:
            raise InvalidPayload(f"{name}: {error}") from None
        if not isinstance(found[name], kind):
            raise InvalidPayload(f"{name}: expected a JSON {json_type}")
    return edit.Changes(**found)


def _page(pk: int) -> str:
    return reverse("admin:django_faktory_job_change", args=[pk])
