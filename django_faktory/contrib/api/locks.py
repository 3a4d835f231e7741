"""Locks over the REST API: list them with holder and expiry, and release one manually."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from django.http import Http404
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request
from rest_framework.response import Response

from ...models import JobLock
from ...store.jobs import transitions
from . import answers
from .base import Resource, get_alias
from .described import describe, describe_action
from .filters import LockFilter
from .paging import NewestFirst


@describe(parameters=[OpenApiParameter("token", OpenApiTypes.INT64, "path", description="The lock's token.")])
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
    docs: ClassVar = {"list": "List locks, the newest first.", "retrieve": "Show a lock."}

    @describe_action(answers.ReleasedLock)
    def release(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Release a lock manually.

        The next job of the key may then run while the former holder still runs.
        """
        lock = self.read_action()
        # By token, so that a lock acquired since is not released; the next job of the key becomes ready (ADR 0015).
        changed = transitions.free_locks([lock.pk], using=get_alias())
        if not changed:  # the lock expired or was released between the two queries
            raise Http404
        self.record(lock, "Released manually")
        return Response({"changed": changed})
