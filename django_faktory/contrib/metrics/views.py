"""Views for a project's URLs: `/metrics`, `/healthz` and `/readyz`. GET and HEAD only, without session.

They change nothing. Access is the project's decision: by its network, or with `FAKTORY["METRICS_TOKEN"]` as a bearer
token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from django.conf import settings
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from ... import conf
from ...operations import statistics
from ...runtime import health

__all__ = ["healthz", "metrics", "readyz"]

View = Callable[[HttpRequest], HttpResponse]


def _guard(view: View) -> View:
    """Wrap a view: require the bearer token if one is set, disable caching, allow safe methods only."""

    @wraps(view)
    def guard(request: HttpRequest) -> HttpResponse:
        if not health.is_authorized(request.headers.get("Authorization", "")):
            refusal = HttpResponse(f"{health.UNAUTHORIZED}\n", status=401)
            refusal["WWW-Authenticate"] = "Bearer"
            return refusal
        return view(request)

    # The statistics open their own transaction, which ATOMIC_REQUESTS would nest.
    for alias in settings.DATABASES:
        transaction.non_atomic_requests(using=alias)(guard)
    return never_cache(require_safe(guard))


@_guard
def metrics(request: HttpRequest) -> HttpResponse:  # noqa: ARG001
    """Return the statistics in Prometheus' text format."""
    from .prometheus import CONTENT_TYPE, exposition  # needs the extra `metrics`; the other views work without it

    return HttpResponse(exposition(statistics.read(using=conf.get("DATABASE"))), content_type=CONTENT_TYPE)


@_guard
def healthz(request: HttpRequest) -> HttpResponse:
    """Return 200 if this process and its database answer; else 503 with the reason.

    With the parameter `deep` a critical alarm is a reason too: for uptime monitors. An orchestrator that restarts
    processes must not use it, because a restart repairs none of the alarms.
    """
    checks = health.check_alive(using=conf.get("DATABASE"))
    if "deep" in request.GET and not any(checks.values()):
        checks |= health.check_alarms(using=conf.get("DATABASE"))
    return _response(checks)


@_guard
def readyz(request: HttpRequest) -> HttpResponse:  # noqa: ARG001
    """Return 200 if jobs can also run (schema, workers, maintenance); else 503 with the reasons."""
    return _response(health.check_ready(using=conf.get("DATABASE")))


def _response(checks: dict[str, str]) -> JsonResponse:
    code, document = health.answer(checks)
    return JsonResponse(document, status=code)
