"""Statistics and alarms over the REST API: what the admin's overview shows."""

from __future__ import annotations

from functools import partial

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import ViewSet

from ... import conf
from ...core.lifecycle import State
from ...models.permissions import may_see
from ...operations import alarms
from ...store.statistics import counts
from . import answers
from .access import HasActionPermission
from .base import ApiView, get_alias
from .described import describe


class _Overview(ApiView, ViewSet):
    permission_classes = (HasActionPermission,)
    resource = "overview"


class Alarms(_Overview):
    """List the conditions that need attention, for monitors and dashboards."""

    @describe(operation_id="alarms_list", responses=answers.Alarm(many=True))
    def list(self, request: Request) -> Response:
        """List what needs attention.

        Critical alarms come first. Names of objects that the user may not view are left out. The list is at most 1 s
        old, or at most 10 times the duration of its read if that is longer.
        """
        visible_alarms = alarms.hide_names(alarms.read(using=get_alias()), partial(may_see, request.user))
        return Response(answers.Alarm(visible_alarms, many=True).data)


class Statistics(_Overview):
    """Totals and counts of all jobs, queues, workers and batches."""

    @describe(operation_id="statistics_retrieve", responses=answers.StatisticsRow)
    def list(self, request: Request) -> Response:  # noqa: ARG002
        """Show totals and counts, as of now."""
        using = get_alias()
        all_counts = counts.read(using=using, worker_timeout_s=conf.get("WORKER_TIMEOUT"))
        return Response(
            {
                **all_counts.totals,
                "sets": {str(state): all_counts.of(state) for state in sorted(State)},
                "queues": len(all_counts.queues),
                "workers": all_counts.workers,
                "batches": counts.count_batches(using=using),
            }
        )
