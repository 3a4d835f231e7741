"""What Django's admin has of us: pages to look at, and acts that call the same steps as the command line.

Lists never count a whole table: what lies beyond `CappedPaginator.cap` is not numbered.
"""

from __future__ import annotations

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.text import Truncator

from . import batch_admin as batch_admin  # noqa: PLC0414  (it registers its own)
from . import cron_admin as cron_admin  # noqa: PLC0414  (the same)
from . import gearmonkey_admin as gearmonkey_admin  # noqa: PLC0414
from . import limit_admin as limit_admin  # noqa: PLC0414
from . import lock_admin as lock_admin  # noqa: PLC0414
from .dashboard.jobs import JobAdmin
from .dashboard.overview_admin import OverviewAdmin
from .dashboard.queues import QueueAdmin
from .dashboard.workers import WorkerProcessAdmin
from .look_only import CappedPaginator as CappedPaginator  # noqa: PLC0414  (people import it from here)
from .look_only import LookOnly, asks, log
from .models import Job, OutboxEntry, Queue, WorkerProcess
from .object_admin import JobsOfObjectMixin as JobsOfObjectMixin  # noqa: PLC0414
from .pages import Overview

admin.site.register(Overview, OverviewAdmin)
admin.site.register(Job, JobAdmin)
admin.site.register(Queue, QueueAdmin)
admin.site.register(WorkerProcess, WorkerProcessAdmin)


@admin.register(OutboxEntry)
class OutboxEntryAdmin(LookOnly):
    """Jobs on their way elsewhere. Those with an error stay until a person lets them try again, or deletes them."""

    list_display = ("id", "jid", "queue", "created_at", "trouble")
    list_filter = (("error", admin.EmptyFieldListFilter), "queue")
    search_fields = ("jid", "error")
    ordering = ("id",)
    paginator = CappedPaginator
    actions = ("try_again",)

    @admin.display(description="error", ordering="error")
    def trouble(self, entry: OutboxEntry) -> str:
        """The beginning of what the server elsewhere said; all of it is on the entry's page."""
        return Truncator(entry.error).chars(300)

    has_try_permission = asks("outboxentry.retry")

    def has_delete_permission(self, request: HttpRequest, obj: OutboxEntry | None = None) -> bool:
        """As the user's permissions say: a row that will never be taken must go some time."""
        return admin.ModelAdmin.has_delete_permission(self, request, obj)

    @admin.action(description="Try again", permissions=["try"])
    def try_again(self, request: HttpRequest, queryset: QuerySet[OutboxEntry]) -> None:
        """Forget the error: the relay takes it with the next ones."""
        rows = list(queryset.exclude(error=""))
        count = OutboxEntry.objects.using(queryset.db).filter(pk__in=[row.pk for row in rows]).update(error="")
        log(request, rows, "Tried again")
        self.message_user(request, f"{count} jobs will be handed on again.", messages.SUCCESS)
