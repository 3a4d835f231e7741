"""Admin page of locks: keys in use, their holders and expiry, and a manual release."""

from __future__ import annotations

from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, gettext_noop, ngettext
from django.utils.translation import gettext_lazy as _

from .. import conf
from ..core.lifecycle import State
from ..models import Job, JobLock
from ..models.permissions import may_see
from ..operations import worker_names
from ..store.jobs import transitions
from .base import ReadOnlyAdmin, requires_permission
from .formats import column, format_number, render_time, render_worker, time_column
from .history import log_action
from .links import jobs_link, row_link
from .lists import CappedPaginator

MAX_COUNTED = 10_000
"""Largest number of waiting jobs that a page counts."""
_WARNING = _(
    "The jobs that have these locks keep running, and jobs that wait for the same keys may run at the same time. "
    "Release a lock only if you know that its job does nothing more."
)


@admin.register(JobLock)
class JobLockAdmin(ReadOnlyAdmin):
    """Admin of locks: searched by key, jid or wid; released manually."""

    gone_because = _("the lock was released, or has expired")
    list_display = ("key", "holder", "worker", "since", "until")
    # A search reads the whole table, which has only one row for each running job with a lock.
    search_fields = ("key", "jid__exact", "wid__exact")
    search_help_text = _("A part of a key, a whole job ID, or a whole worker ID.")
    ordering = ("-id",)
    paginator = CappedPaginator
    list_per_page = 50
    actions = ("release",)
    has_release_permission = requires_permission("joblock.release")
    extra_fields = ("token", "holder", "claims", "worker", "since", "until", "waiting")
    fieldsets = (
        (None, {"fields": ("key", "token", "holder", "claims", "worker", "waiting")}),
        (_("Times"), {"fields": ("since", "until", "lease")}),
    )

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """Read a lock with the name of its worker."""
        lock = super().get_object(request, object_id, from_field)
        if lock is not None:
            self.attach(request, [lock])
        return lock

    def attach(self, request: HttpRequest, rows: list[Any]) -> None:
        """Add the name of the worker to each lock."""
        # Host names need the permission to view workers.
        is_visible = may_see(request.user, "workerprocess")
        names = worker_names.read([lock.wid for lock in rows], using=conf.get("DATABASE")) if is_visible else {}
        for lock in rows:
            lock.worker_name = names.get(lock.wid, "")

    since = time_column("acquired_at", _("since"))

    token = column(attrgetter("pk"), _("token"))
    claims = column(attrgetter("claims"), _("attempt"))
    holder = column(
        lambda lock: format_html('<a href="{}">{}</a>', jobs_link(q=lock.jid), lock.jid), _("held by"), "jid"
    )
    worker = column(lambda lock: render_worker(lock.wid, lock.worker_name) if lock.wid else "–", _("worker"), "wid")

    @admin.display(description=_("until"), ordering="expires_at")
    def until(self, lock: JobLock) -> SafeString | str:
        """Return when the lock expires unless it is extended, marked if it has expired."""
        moment = render_time(lock.expires_at)
        if lock.expires_at > datetime.now(UTC):
            return moment
        return format_html('<span class="faktory-bad">{} {}</span>', moment, gettext("(expired)"))

    @admin.display(description=_("jobs that wait for it"))
    def waiting(self, lock: JobLock) -> str:
        """Return the number of blocked jobs, capped so that no large table is counted."""
        # The state is compared too, because the index of lock keys has it as its second column.
        jobs = Job.objects.in_state(State.BLOCKED).filter(lock_key=lock.key)
        # A hot key can have any number of jobs behind it (ADR 0015).
        count = jobs.count_up_to(MAX_COUNTED)
        return format_number(count, is_more=count == MAX_COUNTED)

    @admin.action(description=_("Release manually"), permissions=["release"])
    def release(self, request: HttpRequest, queryset: QuerySet[JobLock]) -> HttpResponse | None:
        """Release locks after a confirmation: the next job of a key may then run while its former holder still runs."""
        selected = list(queryset)
        confirmation = self.confirmation_page(
            request,
            gettext("Release locks?"),
            objects=map(_describe, selected),
            note=_WARNING,
            button=gettext("Yes, release"),
        )
        if confirmation is not None:
            return confirmation
        # By token, not by key: a lock acquired since the page was shown has a new token and stays.
        count = transitions.free_locks([lock.pk for lock in selected], using=conf.get("DATABASE"))
        log_action(request, selected, gettext_noop("Released manually"))
        message = ngettext("Released %(number)s lock.", "Released %(number)s locks.", count)
        self.message_user(request, message % {"number": format_number(count)}, messages.SUCCESS)
        return None


def holder_of(job: Job) -> SafeString | str:
    """Return the holder of this job's key: the job itself, another job, or none."""
    if job.lock_key is None:
        return "–"
    lock = JobLock.objects.filter(key=job.lock_key).first()
    if lock is None:
        return gettext("none")
    link = format_html('<a href="{}">{}</a>', row_link("joblock", lock.pk), lock.jid)
    # The row of an expired lock can still exist, so the row alone does not prove that the key is in use.
    if lock.expires_at <= datetime.now(UTC):
        return format_html(
            gettext("none: the lease of {job} expired at {time}"), job=link, time=render_time(lock.expires_at)
        )
    is_own = lock.pk == job.lock_token
    text = gettext("this job, {job}, until {time}") if is_own else gettext("another job, {job}, until {time}")
    return format_html(text, job=link, time=render_time(lock.expires_at))


def _describe(lock: JobLock) -> str:
    names = {"key": lock.key, "job": lock.jid, "worker": lock.wid}
    if lock.wid:
        return gettext("%(key)s, held by %(job)s of worker %(worker)s") % names
    return gettext("%(key)s, held by %(job)s") % names
