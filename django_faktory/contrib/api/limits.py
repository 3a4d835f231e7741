"""Limits over the REST API: list, set, change and delete them while jobs run.

Pausing a task is implemented as a limit of zero, so pause and resume are here as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter
from rest_framework import status
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from ...core.limits import Allowance
from ...models import Limit
from ...operations.rows import LimitRow
from ...operations.serializers import read_limits
from ...store.limits import definitions
from ...tasks import limits as task_limits
from . import answers, inputs
from .base import ADDED, DELETED, REASON, Resource, get_alias
from .described import UNSEEN, describe, describe_action
from .filters import LimitFilter
from .paging import NewestFirst
from .problems import WrongState


@describe(parameters=[OpenApiParameter("id", OpenApiTypes.INT64, "path", description="The limit's number.")])
class Limits(Resource):
    """Limits on the jobs of a queue, task or key that run at once or start per period."""

    queryset = Limit.objects.none()
    serializer_class, detail_class = answers.Limit, answers.LimitDetail
    pagination_class = NewestFirst
    filterset_class = LimitFilter
    lookup_field = "pk"
    lookup_url_kwarg = "id"
    # A 64-bit id has up to 19 digits; each number of 18 digits fits.
    lookup_value_regex = "[0-9]{1,18}"
    resource = "limit"
    docs: ClassVar = {"list": "List limits, the newest first.", "retrieve": "Show a limit."}

    def serialize(self, rows: Any) -> Any:
        """Return the limits with their current use."""
        return read_limits(rows, using=get_alias(), row=LimitRow)

    def serialize_one(self, row: Limit) -> Any:
        """Return a limit with its use and the number of jobs waiting for it."""
        return read_limits([row], using=get_alias())[0]

    @describe(request=inputs.NewLimitSerializer, responses={201: answers.LimitDetail, 204: UNSEEN})
    def create(self, request: Request) -> Response:  # noqa: ARG002
        """Set a limit.

        It applies at once, also to jobs that wait or run already.
        """
        validated = self.read_input(inputs.NewLimitSerializer)
        scope, allowance = validated["scope"], _parse_allowance(validated)
        name = task_limits.check_name(scope, validated["name"])
        # `definitions.save_limit` overwrites an existing limit, so that POST would change it without a warning.
        if Limit.objects.using(get_alias()).filter(scope=scope, name=name).exists():
            raise WrongState(f"name: there is a limit of {scope} {name:.80} already; change that")
        limit = definitions.save_limit(scope, name, allowance, using=get_alias())
        self.record(limit, "Written", flag=ADDED)
        return self.respond(lambda: self.serialize_one(limit), code=status.HTTP_201_CREATED)

    @describe(request=inputs.LimitChangesSerializer, responses={200: answers.LimitDetail, 204: UNSEEN})
    def update(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Change a limit.

        It applies at once and overrides the code. A value left out means no limit of that kind.
        """
        validated, limit = self.read_input(inputs.LimitChangesSerializer), self.get_object()
        # Writes the limiters too, whose row locks make the new numbers apply at the commit (ADR 0016).
        changed = definitions.save_limit(limit.scope, limit.name, _parse_allowance(validated), using=get_alias())
        self.record(changed, f"Edited: {changed.allowance_text}")
        return self.respond(lambda: self.serialize_one(changed))

    @describe(parameters=[REASON], responses={200: answers.RemovedLimit, 204: None})
    def destroy(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Delete a limit.

        Jobs that wait for it may start. A limit defined in code is created again when a node starts.
        """
        limit = self.read_action()
        # Written before the delete: the log entry needs the primary key of the row.
        self.record(limit, "Deleted", flag=DELETED)
        definitions.remove(limit, using=get_alias())
        if limit.removal_warning:
            return self.respond(lambda: {"detail": limit.removal_warning})
        return Response(status=status.HTTP_204_NO_CONTENT)

    @describe_action(answers.ChangedTasks, request=inputs.TaskNamesSerializer, detail=False)
    def pause(self, request: Request) -> Response:
        """Pause tasks.

        None of their jobs starts from now on; running jobs continue.
        """
        tasks = self.read_input(inputs.TaskNamesSerializer)["tasks"]
        return self._execute(tasks, partial(definitions.pause, by=str(request.user), reason=self.reason), "Paused")

    @describe_action(answers.ChangedTasks, request=inputs.TaskNamesSerializer, detail=False)
    def resume(self, request: Request) -> Response:  # noqa: ARG002
        """Resume tasks.

        Their jobs start again, within their limits.
        """
        return self._execute(self.read_input(inputs.TaskNamesSerializer)["tasks"], definitions.resume, "Resumed")

    def _execute(self, tasks: Sequence[str], change: Any, summary: str) -> Response:
        changed = change([task_limits.check_name("task", name) for name in tasks], using=get_alias())
        # Without a row: a limit that is only a pause is deleted by a resume, so the entry names the task.
        for name in changed:
            self.record(Limit, summary, name=name)
        return Response({"tasks": changed})


def _parse_allowance(validated: Mapping[str, Any]) -> Allowance:
    # A missing member and null both mean: no limit of this kind.
    numbers = {key: validated[key] for key in ("concurrency", "rate", "burst") if validated.get(key) is not None}
    if not numbers:
        raise ValidationError("expected concurrency, rate or both, got neither")
    return Allowance.of(numbers)
