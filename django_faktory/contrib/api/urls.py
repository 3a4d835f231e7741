"""URLs of the API: `path("api/", include("django_faktory.contrib.api.urls"))`.

A new resource is one more line of `RESOURCES`.
"""

from __future__ import annotations

from typing import Any

from django.urls import include, path
from drf_spectacular.views import SpectacularAPIView
from rest_framework.permissions import IsAuthenticated
from rest_framework.routers import APIRootView, DefaultRouter

from .base import ApiView
from .batches import Batches
from .cron import CronEntries
from .jobs import Jobs
from .limits import Limits
from .locks import Locks
from .overview import Alarms, Statistics
from .queues import Queues
from .workers import Workers

app_name = "faktory-api"

RESOURCES: dict[str, Any] = {
    "jobs": Jobs,
    "queues": Queues,
    "workers": Workers,
    "batches": Batches,
    "cron": CronEntries,
    "limits": Limits,
    "locks": Locks,
    "statistics": Statistics,
    "alarms": Alarms,
}


class Root(ApiView, APIRootView):
    """Jobs, queues, workers, batches, cron entries, limits, locks, statistics and alarms."""

    permission_classes = (IsAuthenticated,)
    schema: Any = None


class _Router(DefaultRouter):
    # The router's own root view has the project's default permissions; `Root` requires a log-in.
    APIRootView = Root
    # A suffix such as `.json` could be part of a queue's name.
    include_format_suffixes = False


class OpenApi(ApiView, SpectacularAPIView):
    """The OpenAPI document of this API alone; `?format=json` for JSON."""

    # YAML or JSON, unlike the resources.
    renderer_classes = SpectacularAPIView.renderer_classes
    permission_classes = (IsAuthenticated,)
    urlconf: Any = "django_faktory.contrib.api.urls"
    schema: Any = None
    # Own settings: those of the project describe its other APIs.
    custom_settings: Any = {  # noqa: RUF012  (the framework's name for it)
        "TITLE": "django_faktory",
        "DESCRIPTION": "Background jobs: list and enqueue them, and act on them.",
        "VERSION": "1",
        "SCHEMA_PATH_PREFIX": "/",
        "POSTPROCESSING_HOOKS": [],  # the default hook names enums, and two names would collide
        "COMPONENT_SPLIT_REQUEST": True,
        "OAS_VERSION": "3.1.0",
    }

    def get_parameters(self) -> list[str]:
        """Return the parameters of drf-spectacular too."""
        return [*super().get_parameters(), "lang"]

    def _get_schema_response(self, request: Any) -> Any:
        """Return the document with the server URL, derived from the request path.

        It is relative to the document's own URL, so it is valid behind any proxy.
        """
        response = super()._get_schema_response(request)  # type: ignore[no-untyped-call]
        mount = request.path.removesuffix("schema/").rstrip("/")
        response.data = {**response.data, "servers": [{"url": mount or "/"}]}
        return response


router = _Router()
for name, resource in RESOURCES.items():
    router.register(name, resource, basename=name)

urlpatterns = [path("schema/", OpenApi.as_view(), name="schema"), path("", include(router.urls))]
