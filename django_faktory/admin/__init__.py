"""Register the admin pages: read-only views, plus actions that call the same functions as the command line.

Lists count at most `lists.MAX_COUNTED` rows, never a whole table.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.text import Truncator
from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop, ngettext

from ..core.json import jsontext
from ..errors import FaktoryError
from ..models import Job, OutboxEntry, Queue, WorkerProcess
from ..models.proxies import Overview
from ..tasks import redaction
from . import batches, cron, gearmonkey, labels, limits, locks  # noqa: F401  (importing them registers their pages)
from .base import FaktoryModelAdmin, ReadOnlyAdmin, requires_permission
from .formats import column, format_number, time_column
from .history import log_action
from .jobs.changelist import JobAdmin
from .lists import CappedPaginator as CappedPaginator  # (documented import location)
from .long_texts import LongText, long_text_column
from .mixins import JobsOfObjectMixin as JobsOfObjectMixin
from .overview.view import OverviewAdmin
from .queues import QueueAdmin
from .workers import WorkerProcessAdmin

labels.install()
admin.site.register(Overview, OverviewAdmin)
admin.site.register(Job, JobAdmin)
admin.site.register(Queue, QueueAdmin)
admin.site.register(WorkerProcess, WorkerProcessAdmin)


def _redact_job(_entry: OutboxEntry, text: str) -> str:
    """Return the job in an outbox entry's text, with redaction applied."""
    try:
        members = jsontext.last_members(text)
        jobtype, job = (jsontext.decode(members[name]) for name in ("jobtype", "text"))
    except (FaktoryError, KeyError):
        # What cannot be parsed cannot be redacted, so with redaction on none of it is shown.
        return jsontext.encode(redaction.HIDDEN) if redaction.is_on() else text
    return redaction.redact_job(str(jobtype), str(job))


@admin.register(OutboxEntry)
class OutboxEntryAdmin(ReadOnlyAdmin):
    """Jobs that wait to be sent to another database or to a Faktory server, and jobs that were refused there.

    A refused job has an error and stays until a user retries or deletes it.
    """

    gone_because = _("its job was sent, or it was deleted")
    list_display = ("id", "job_id", "queue", "created", "short_error")
    list_filter = (("error", admin.EmptyFieldListFilter), "queue")
    search_fields = ("jid", "error")
    ordering = ("id",)
    paginator = CappedPaginator
    actions = ("try_again",)
    # `REDACT` gets arguments only, so it does not apply to an error; `view_job` does (ADR 0034).
    long_texts: ClassVar = {"job": LongText("job", _redact_job), "error": LongText("error", is_json=False)}
    beginnings: ClassVar = {"error": 400}
    restricted_fields: ClassVar = {"short_error": "error", "shown_error": "error", "shown_job": "job"}
    extra_fields = ("job_id", "created", "leased", "shown_job", "shown_error")
    fieldsets = ((None, {"fields": ("job_id", "queue", "created", "leased", "shown_error", "shown_job")}),)

    created = time_column("created_at", _("created"))
    leased = time_column("leased_until", _("leased until"))
    shown_error = long_text_column("error", _("error"))
    shown_job = long_text_column("job", _("job"))

    job_id = column(attrgetter("jid"), _("job ID"), "jid")
    short_error = column(lambda entry: Truncator(entry.error).chars(300), _("error"), "error")
    has_retry_permission = requires_permission("outboxentry.retry")

    def get_search_fields(self, request: HttpRequest) -> Any:
        """Search in errors only if the user may see errors.

        A search would otherwise reveal text that the list hides.
        """
        return self.search_fields if self.may_see_field(request, "short_error") else ("jid",)

    def has_delete_permission(self, request: HttpRequest, obj: OutboxEntry | None = None) -> bool:
        """Return whether the user may delete the entry.

        Unlike the other read-only pages, because nothing else removes a row that no server accepts.
        """
        return FaktoryModelAdmin.has_delete_permission(self, request, obj)

    @admin.action(description=_("Retry"), permissions=["retry"])
    def try_again(self, request: HttpRequest, queryset: QuerySet[OutboxEntry]) -> None:
        """Clear the error so that the outbox relay sends the entry again."""
        # Without the job, which may be long: the log needs the names only.
        rows = list(queryset.exclude(error="").only("jid"))
        count = OutboxEntry.objects.filter(pk__in=[row.pk for row in rows]).update(error="")
        log_action(request, rows, gettext_noop("Retried"))
        message = ngettext("%(number)s job will be sent again.", "%(number)s jobs will be sent again.", count)
        self.message_user(request, message % {"number": format_number(count)}, messages.SUCCESS)
