"""The numbers of all jobs, queues and workers."""

from __future__ import annotations

from typing import ClassVar

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import ViewSet

from .. import conf
from ..lifecycle import State
from ..store import stats
from . import answers
from .access import May
from .base import Door, alias
from .described import described

COUNTED = 5_000
"""Jobs of each state that are counted."""


class Numbers(Door, ViewSet):
    """One look at everything."""

    permission_classes = (May,)
    needs: ClassVar = {"list": "overview.view"}

    @described(
        operation_id="statistics_retrieve",
        summary="Show the numbers",
        description="Totals are exact; jobs, queues and batches are counted up to `counted_to`. The numbers may be a "
        "second old, or ten times as old as reading them takes. `/metrics` and INFO count everything.",
        responses=answers.Statistics,
    )
    def list(self, request: Request) -> Response:  # noqa: ARG002
        """One snapshot."""
        found = stats.shared_glance(using=alias(), worker_timeout_s=conf.get("WORKER_TIMEOUT"))
        states = (State.BLOCKED, State.DEAD, State.ENQUEUED, State.RETRIES, State.SCHEDULED, State.WORKING)
        return Response(
            {
                **found.totals,
                "sets": {str(state): min(found.of(state), COUNTED) for state in states},
                "queues": min(len(found.queues), COUNTED),
                "workers": found.workers,
                "batches": {name: min(count, COUNTED) for name, count in found.batches.items()},
                "counted_to": COUNTED,
            }
        )
