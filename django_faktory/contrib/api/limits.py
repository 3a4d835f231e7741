"""Limits over the REST API: list, set, change and delete them while jobs run.

Pausing a task is implemented as a limit of zero, so pause and resume are here as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema_view
from rest_framework import status
from rest_framework.decorators import action
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from ...core.limits import Allowance
from ...models import Limit
from ...operations.serializers import limit_of
from ...store.limits import definitions
from ...tasks import limits as task_limits
from . import answers, inputs
from .base import Resource, alias
from .described import UNSEEN, F, described
from .filters import LimitFilter
from .journal import ADDED, DELETED, note
from .paging import NewestFirst
from .problems import WrongState


def _acts(summary: str, description: str) -> Callable[[F], F]:
    return described(
        summary=summary,
        description=description,
        request=inputs.TaskNamesSerializer,
        responses={200: answers.ChangedTasksSerializer},
    )


@described(parameters=[OpenApiParameter("id", OpenApiTypes.INT64, "path", description="The limit's number.")])
@extend_schema_view(
    list=described(summary="List limits, the newest first", parameters=[OpenApiParameter("id", exclude=True)]),
    retrieve=described(summary="Show a limit", responses=answers.LimitDetailSerializer),
)
class Limits(Resource):
    """Limits on the jobs of a queue, task or key that run at once or start per period."""

    queryset = Limit.objects.none()
    serializer_class = answers.LimitSerializer
    pagination_class = NewestFirst
    filterset_class = LimitFilter
    lookup_field = "pk"
    lookup_url_kwarg = "id"
    lookup_value_regex = "[0-9]{1,18}"
    keys = re.compile("[0-9]{1,18}")
    resource = "limit"
    needs: ClassVar = {
        "list": "limit.view",
        "retrieve": "limit.view",
        "create": "limit.add",
        "update": "limit.change",
        "destroy": "limit.delete",
        "pause": "limit.pause",
        "resume": "limit.resume",
    }

    def get_queryset(self) -> Any:
        """Return all limits, including those defined in code."""
        return Limit.objects.using(alias())

    def list(self, request: Request) -> Response:  # noqa: ARG002
        """Return limits with their current use, which is read for one page at a time."""
        page = self.paginate_queryset(self.filter_queryset(self.get_queryset())) or []
        # One query for the use of the whole page, instead of one per limit.
        used = definitions.read_usage([limit.pk for limit in page], using=alias())
        return self.get_paginated_response([limit_of(limit, *used.get(limit.pk, ())) for limit in page])

    def retrieve(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Return one limit with its use and the number of jobs waiting for it."""
        return Response(_whole(self.get_object()))

    @described(
        summary="Set a limit",
        description="It applies at once, also to jobs that wait or run already.",
        request=inputs.NewLimitSerializer,
        responses={201: answers.LimitDetailSerializer, 204: UNSEEN},
        parameters=[OpenApiParameter("id", exclude=True)],
    )
    def create(self, request: Request) -> Response:
        """Create a limit; raise WrongState (409) if the limit already exists."""
        values = self.validated_data(inputs.NewLimitSerializer)
        name, allowance = task_limits.checked_name(values["scope"], values["name"]), _allowance(values)
        # `definitions.save_limit` overwrites an existing limit, so that POST would change it without a warning.
        if Limit.objects.using(alias()).filter(scope=values["scope"], name=name).exists():
            raise WrongState(f"name: there is a limit of {values['scope']} {name:.80} already; change that")
        limit = definitions.save_limit(values["scope"], name, allowance, using=alias())
        note(request, limit, "Written", flag=ADDED, reason=values.get("reason", ""))
        return self.answer(lambda: _whole(limit), code=status.HTTP_201_CREATED)

    @described(
        summary="Change a limit",
        description="It applies at once and overrides the code. A value left out means no limit of that kind.",
        request=inputs.LimitChangesSerializer,
        responses={200: answers.LimitDetailSerializer, 204: UNSEEN},
    )
    def update(self, request: Request, **_: Any) -> Response:
        """Replace what the limit allows; a pause of the task remains in effect."""
        values, limit = self.validated_data(inputs.LimitChangesSerializer), self.get_object()
        changed = definitions.save_limit(limit.scope, limit.name, _allowance(values), using=alias())
        note(request, changed, f"Edited: {changed.allowance_text}", reason=values.get("reason", ""))
        return self.answer(lambda: _whole(changed))

    @described(
        summary="Delete a limit",
        description="Jobs that wait for it may start. A limit defined in code is created again when a node starts.",
        parameters=[OpenApiParameter("reason", OpenApiTypes.STR, description="Reason for the log.")],
        responses={204: None},
    )
    def destroy(self, request: Request, **_: Any) -> Response:
        """Delete the limit; its running jobs continue."""
        why, limit = self.validated_data(inputs.ReasonSerializer, of=request.query_params), self.get_object()
        # Written before the delete: the log entry needs the primary key of the row.
        note(request, limit, "Deleted", flag=DELETED, reason=why["reason"])
        definitions.remove(limit, using=alias())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @_acts("Pause tasks", "None of their jobs starts from now on; running jobs continue.")
    @action(detail=False, methods=["post"])
    def pause(self, request: Request) -> Response:
        """Pause the tasks; a task that is already paused is not changed."""
        return self._act(request, definitions.pause, "Paused")

    @_acts("Resume tasks", "Their jobs start again, within their limits.")
    @action(detail=False, methods=["post"])
    def resume(self, request: Request) -> Response:
        """Resume the tasks; a task that is not paused is not changed."""
        return self._act(request, definitions.resume, "Resumed")

    def _act(self, request: Request, act: Any, done: str) -> Response:
        values = self.validated_data(inputs.TaskNamesSerializer)
        changed = act([task_limits.checked_name("task", name) for name in values["tasks"]], using=alias())
        for name in changed:
            note(request, Limit, done, name=name, reason=values["reason"])
        return Response({"tasks": changed})


def _whole(limit: Limit) -> dict[str, Any]:
    used = definitions.read_usage([limit.pk], using=alias()).get(limit.pk, ())
    return {**limit_of(limit, *used), "waiting": definitions.waiting(limit, using=alias())}


def _allowance(values: Mapping[str, Any]) -> Allowance:
    # A missing member and null both mean: no limit of this kind.
    found = {key: values[key] for key in ("concurrency", "rate", "burst") if values.get(key) is not None}
    if not found:
        raise ValidationError("expected concurrency, rate or both, got neither")
    return Allowance.of(found)
