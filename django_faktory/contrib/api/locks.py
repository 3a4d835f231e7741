"""Locks over the REST API: list them with holder and expiry, and release one manually."""

from __future__ import annotations

import re
from typing import Any

from django.http import Http404
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema_view
from rest_framework.request import Request
from rest_framework.response import Response

from ...models import JobLock
from ...store.jobs import transitions
from . import answers, inputs
from .base import Resource, get_alias
from .described import describe, describe_action
from .filters import LockFilter
from .journal import record_change
from .paging import NewestFirst


@describe(parameters=[OpenApiParameter("token", OpenApiTypes.INT64, "path", description="The lock's token.")])
@extend_schema_view(
    list=describe(summary="List locks, the newest first"),
    retrieve=describe(summary="Show a lock"),
)
class Locks(Resource):
    """Lock keys that running jobs hold."""

    queryset = JobLock.objects.none()
    serializer_class = answers.Lock
    pagination_class = NewestFirst
    filterset_class = LockFilter
    lookup_field = "pk"
    lookup_url_kwarg = "token"
    # A 64-bit id has up to 19 digits; each number of 18 digits fits.
    key_pattern = re.compile("[0-9]{1,18}")
    resource = "joblock"

    def get_queryset(self) -> Any:
        """Return all locks, including expired ones that no other job has acquired yet."""
        return JobLock.objects.using(get_alias())

    @describe_action(
        "Release a lock manually",
        "The next job of the key may then run while the former holder still runs.",
        answers.ReleasedLock,
    )
    def release(self, request: Request, **_: Any) -> Response:
        """Release the lock with this token.

        A lock that another job has acquired since has another token and is not touched.
        """
        validated, lock = self.read_input(inputs.ReasonSerializer), self.get_object()
        # By token, so that a lock acquired since is not released; the next job of the key becomes ready (ADR 0015).
        changed = transitions.free_locks([lock.pk], using=get_alias())
        if not changed:  # the lock expired or was released between the two queries
            raise Http404
        record_change(request, lock, "Released manually", reason=validated["reason"])
        return Response({"changed": changed})
