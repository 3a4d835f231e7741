"""Alarms over the REST API: the conditions that need attention, as on the overview of the admin."""

from __future__ import annotations

from functools import partial

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import ViewSet

from ...models.permissions import may_see
from ...operations import alarms
from . import answers
from .access import HasActionPermission
from .base import ApiView, get_alias
from .described import describe


class Alarms(ApiView, ViewSet):
    """List the conditions that need attention, for monitors and dashboards."""

    permission_classes = (HasActionPermission,)
    resource = "overview"

    @describe(
        operation_id="alarms_list",
        summary="List what needs attention",
        description="Critical alarms come first. Names of objects that the user may not view are left out. The list "
        "is at most 1 s old, or at most 10 times the duration of its read if that is longer.",
        responses=answers.Alarm(many=True),
    )
    def list(self, request: Request) -> Response:
        visible_alarms = alarms.hide_names(alarms.read(using=get_alias()), partial(may_see, request.user))
        return Response(answers.Alarm(visible_alarms, many=True).data)
