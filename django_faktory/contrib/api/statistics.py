"""Statistics over the REST API: totals, and counts of jobs, queues, workers and batches."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import ViewSet

from ... import conf
from ...core.lifecycle import State
from ...store.statistics import counts
from . import answers
from .access import HasActionPermission
from .base import ApiView, get_alias
from .described import describe

COUNTED = 5_000
"""Counts of jobs, queues and batches end here: an exact count of a large table takes too long for a request."""


class Statistics(ApiView, ViewSet):
    """Totals and capped counts of all jobs, queues, workers and batches."""

    permission_classes = (HasActionPermission,)
    resource = "overview"
    counted_to = COUNTED

    @describe(
        operation_id="statistics_retrieve",
        summary="Show totals and counts",
        description="Totals are exact; jobs, queues and batches are counted up to `counted_to`. The counts are at "
        "most 1 s old, or at most 10 times the duration of their read if that is longer. `/metrics` and INFO count "
        "everything.",
        responses=answers.StatisticsRow,
    )
    def list(self, request: Request) -> Response:  # noqa: ARG002
        """Return one shared snapshot of the statistics."""
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
