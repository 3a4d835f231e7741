"""Addresses of the admin's pages, each on the AdminSite of the page that is shown: a project may have several.

`{% url %}` reads the site from the request. Functions that build links in Python have none, so each view sets the
site first, as Django does with the language.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any
from urllib.parse import urlencode

from django.contrib.admin.utils import quote
from django.http.response import HttpResponseBase
from django.urls import reverse

site: ContextVar[str] = ContextVar("django_faktory_admin_site", default="admin")
"""Name of the AdminSite of the page."""


def with_site(name: str, view: Callable[..., HttpResponseBase]) -> Callable[..., HttpResponseBase]:
    """Wrap a view of this AdminSite so that its links lead to the same site."""

    @wraps(view)
    def view_of_site(*args: Any, **kwargs: Any) -> HttpResponseBase:
        # Never reset: the page is rendered after the view has returned, and the next page sets its own site.
        site.set(name)
        return view(*args, **kwargs)

    return view_of_site


def admin_url(name: str, *args: Any) -> str:
    """Return the address of a page of any app. Raises NoReverseMatch if the site does not have it."""
    return reverse(f"admin:{name}", args=args, current_app=site.get())


def page_url(name: str, *args: Any, **query: Any) -> str:
    """Return the address of a page of this app, such as `page_url("job_changelist", state="dead")`."""
    address = admin_url(f"django_faktory_{name}", *args)
    return f"{address}?{urlencode(query)}" if query else address


def jobs_link(**filters: str) -> str:
    """Return the URL of the job list with these filters."""
    return page_url("job_changelist", **filters)


def row_link(model: str, key: int | str) -> str:
    """Return the URL of a row's page."""
    # Keys such as names of queues may contain `_`, with which the URLs of the admin begin an escape.
    return page_url(f"{model}_change", quote(key))
