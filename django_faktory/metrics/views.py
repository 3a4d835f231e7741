"""`/metrics`, `/healthz`, `/readyz` for a project's URLs. GET only; they change nothing and ask for no session.

Who may read them is for the project to say: by its network, or `FAKTORY["METRICS_TOKEN"]` as a bearer token.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from django.conf import settings
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from .. import conf
from . import health
from .numbers import read

View = Callable[[HttpRequest], HttpResponse]


def _guarded(view: View) -> View:
    """Ask for the token, where there is one."""

    def ask(request: HttpRequest) -> HttpResponse:
        token = str(conf.get("METRICS_TOKEN"))
        given = request.headers.get("Authorization", "")
        if token and not secrets.compare_digest(given.encode(), f"Bearer {token}".encode()):
            refusal = HttpResponse("expected the header Authorization: Bearer <METRICS_TOKEN>\n", status=401)
            refusal["WWW-Authenticate"] = "Bearer"
            return refusal
        return view(request)

    for alias in settings.DATABASES:  # numbers of large sets are read in a transaction of their own
        transaction.non_atomic_requests(using=alias)(ask)
    return never_cache(require_safe(ask))


@_guarded
def metrics(request: HttpRequest) -> HttpResponse:  # noqa: ARG001
    """The numbers in Prometheus' text format."""
    from .prometheus import CONTENT_TYPE, exposition  # the extra `metrics`: who has it not may use the others

    return HttpResponse(exposition(read(using=conf.get("DATABASE"))), content_type=CONTENT_TYPE)


@_guarded
def healthz(request: HttpRequest) -> HttpResponse:  # noqa: ARG001
    """200 where this process and its database answer; 503 with the reason where not."""
    return _told(health.alive(using=conf.get("DATABASE")))


@_guarded
def readyz(request: HttpRequest) -> HttpResponse:  # noqa: ARG001
    """200 where jobs are worked on as well: the schema is there, and each loop has done its round lately."""
    return _told(health.ready(using=conf.get("DATABASE")))


def _told(checks: dict[str, str]) -> JsonResponse:
    is_good = not any(checks.values())
    body = {"status": "ok" if is_good else "failing", "checks": {name: why or "ok" for name, why in checks.items()}}
    return JsonResponse(body, status=200 if is_good else 503)
