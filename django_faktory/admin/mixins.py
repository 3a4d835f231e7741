"""ModelAdmin mixin that shows the jobs about an object on that object's admin page."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import Model
from django.forms import Media
from django.http import HttpRequest
from django.urls import NoReverseMatch
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import Job
from ..models.permissions import may_see
from ..models.related_object import about_of
from .base import get_media, map_fields
from .formats import event_time_of, render_time
from .labels import STATES
from .links import jobs_link, row_link, site
from .sanitize import make_readable

if TYPE_CHECKING:
    AnyAdmin = admin.ModelAdmin[Any]
else:
    AnyAdmin = object

JOBS_SHOWN = 20
FIELD = "jobs_about_it"
# Without the long texts: reading another column would take one more query for each row.
COLUMNS = ("id", "jid", "jobtype", "state", "queue", "errtype", "enqueued_at", "run_at", "started_at", "finished_at")


class JobsOfObjectMixin(AnyAdmin):
    """Add the object's latest jobs: `class OrderAdmin(JobsOfObjectMixin, admin.ModelAdmin)`.

    The jobs are those enqueued with `using(about=order)`; viewing them requires the permission to view jobs.
    """

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Add the field with the jobs, if the object exists."""
        fields = super().get_readonly_fields(request, obj)
        return [*fields, FIELD] if _may_see_jobs(request, obj) else fields

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Move the jobs to a section of their own, the last one."""
        fieldsets = map_fields(super().get_fieldsets(request, obj), lambda name: None if name == FIELD else name)
        return [*fieldsets, (_("Jobs"), {"fields": (FIELD,)})] if _may_see_jobs(request, obj) else fieldsets

    @property
    def media(self) -> Media:
        """Django's files, and the style sheet of the table."""
        return super().media + get_media()

    @admin.display(description=_("latest jobs"))
    def jobs_about_it(self, obj: Model) -> SafeString | str:
        """Return a table of the latest jobs, newest first, with links to each and to the whole list."""
        site.set(self.admin_site.name)
        # The index `faktory_about` serves this lookup.
        about = about_of(obj)
        # One row more than shown is read, to know whether there are more without a count.
        jobs = list(Job.objects.about(about).order_by("-pk").only(*COLUMNS)[: JOBS_SHOWN + 1])
        if not jobs:
            return "–"
        heads = format_html_join(
            "",
            '<th scope="col">{}</th>',
            [(gettext("job"),), (gettext("state"),), (gettext("queue"),), (gettext("time"),), (gettext("error"),)],
        )
        rows = format_html_join(
            "", "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>", map(_build_row, jobs[:JOBS_SHOWN])
        )
        table = format_html(
            '<div class="faktory-wide"><table aria-label="{}">'
            "<thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>",
            gettext("Latest jobs"),
            heads,
            rows,
        )
        return format_html("{}{}", table, _link_to_all(about, is_more=len(jobs) > JOBS_SHOWN))


def _may_see_jobs(request: HttpRequest, obj: Any) -> bool:
    # A new object has no key yet, so no job can be about it.
    return obj is not None and may_see(request.user, "job")


def _build_row(job: Job) -> tuple[Any, ...]:
    name = make_readable(job.jobtype)
    with suppress(NoReverseMatch):  # an admin site may have no page for jobs
        name = format_html('<a href="{}">{}</a>', row_link("job", job.pk), name)
    return name, STATES[job.state], job.queue, render_time(event_time_of(job)), make_readable(job.errtype)


def _link_to_all(about: str, *, is_more: bool) -> SafeString | str:
    try:
        link = jobs_link(about=about)
    except NoReverseMatch:
        return ""
    label = gettext("see them in the list of jobs")
    if is_more:
        label = gettext("more than %(number)s: see all") % {"number": JOBS_SHOWN}
    return format_html('<p><a href="{}">{}</a></p>', link, label)
