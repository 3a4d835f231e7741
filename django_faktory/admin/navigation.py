"""The navigation bar above each page of the admin: the pages that the user may see, some with a count."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from django.http import HttpRequest
from django.urls import NoReverseMatch
from django.utils.translation import gettext_lazy as _

from .. import conf
from ..contrib.gearmonkey.settings import is_configured as is_gearmonkey_configured
from ..core.lifecycle import FAILED, State
from ..models import OutboxEntry, WorkerProcess
from ..models.permissions import may_see
from ..store.statistics import counts
from .formats import StrOrPromise, format_number
from .links import page_url


class NavigationLink(NamedTuple):
    label: StrOrPromise
    url: str
    number: str
    """Empty if there is nothing to count, or the user may not see numbers."""
    is_bad: bool
    is_current: bool


class _Page(NamedTuple):
    label: StrOrPromise
    url_name: str
    resource: str
    field: str | None = None
    format_number: Callable[[counts.AllCounts], str] | None = None


def _format_waiting(all_counts: counts.AllCounts) -> str:
    return format_number(all_counts.of(State.ENQUEUED, State.BLOCKED))


def _format_workers(all_counts: counts.AllCounts) -> str:
    return format_number(all_counts.workers[WorkerProcess.Phase.RUNNING])


_PAGES = (
    _Page(_("Overview"), "overview_changelist", "overview"),
    _Page(_("Tasks"), "tasks", "overview", "tasks"),
    _Page(_("Jobs"), "job_changelist", "job"),
    _Page(_("Errors"), "job_errors", "job", None, lambda all_counts: format_number(all_counts.of(*FAILED))),
    _Page(_("Queues"), "queue_changelist", "queue", None, _format_waiting),
    _Page(_("Workers"), "workerprocess_changelist", "workerprocess", None, _format_workers),
    _Page(_("Batches"), "batch_changelist", "batch"),
    _Page(_("Cron"), "cronentry_changelist", "cronentry"),
    _Page(_("Limits"), "limit_changelist", "limit"),
    _Page(_("Locks"), "joblock_changelist", "joblock"),
    _Page(_("Outbox"), "outboxentry_changelist", "outboxentry"),
    _Page(_("GearMonkey"), "gearmonkeyfunction_changelist", "gearmonkeyfunction"),
)


def build_navigation(request: HttpRequest) -> list[NavigationLink]:
    """Return the links that the user may follow. Pages of features that are not in use are left out."""
    pages = [(page, url) for page in _PAGES if (url := _find_url(page, request))]
    all_counts = None
    if may_see(request.user, "overview") and any(page.format_number for page, _url in pages):
        using = conf.get("DATABASE")
        all_counts = counts.read(using=using, worker_timeout_s=conf.get("WORKER_TIMEOUT"))
    # The URL of the errors begins with that of the jobs, so the longest match is the current page.
    current = max((url for _page, url in pages if request.path.startswith(url)), key=len, default="")
    links = []
    for page, url in pages:
        number = page.format_number(all_counts) if page.format_number and all_counts else ""
        # Failed jobs, or no running worker.
        is_bad = (
            number not in ("", "0") if page.resource == "job" else page.resource == "workerprocess" and number == "0"
        )
        links.append(NavigationLink(page.label, url, number, is_bad, url == current))
    return links


def _find_url(page: _Page, request: HttpRequest) -> str:
    """Return the URL of the page; "" if the user may not see it or the feature is not in use."""
    if not may_see(request.user, page.resource, page.field):
        return ""
    try:
        url = page_url(page.url_name)
    except NoReverseMatch:  # a project may unregister pages
        return ""
    if page.resource == "outboxentry" and not request.path.startswith(url):
        # The database of the page, which is another one than that of the jobs: see `conf.outbox`.
        return url if OutboxEntry.objects.exists() else ""
    if page.resource == "gearmonkeyfunction" and not is_gearmonkey_configured():
        return ""
    return url
