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

COUNTED = 5_000
"""Counts of jobs, queues and batches end here: an exact count of a large table takes too long for a request."""


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
    """Totals and capped counts of all jobs, queues, workers and batches."""

    counted_to = COUNTED

    @describe(operation_id="statistics_retrieve", responses=answers.StatisticsRow)
    def list(self, request: Request) -> Response:  # noqa: ARG002
        """Show totals and counts.

        Totals are exact; jobs, queues and batches are counted up to `counted_to`. The counts are at most 1 s old, or at
        most 10 times the duration of their read if that is longer. `/metrics` and INFO count everything.
        """
        # Shared with the admin and the metrics of this process, so that polling clients do not add statements.
        all_counts = counts.shared_bounded_counts(using=get_alias(), worker_timeout_s=conf.get("WORKER_TIMEOUT"))
        # Finished states are not counted: their rows can be millions, and no shared count has them.
        states = (State.BLOCKED, State.DEAD, State.ENQUEUED, State.RETRIES, State.SCHEDULED, State.WORKING)
        return Response(
            {
                **all_counts.totals,
                "sets": {str(state): min(all_counts.of(state), self.counted_to) for state in states},
                "queues": min(len(all_counts.queues), self.counted_to),
                "workers": all_counts.workers,
                "batches": {name: min(count, self.counted_to) for name, count in all_counts.batches.items()},
                "counted_to": self.counted_to,
            }
        )
