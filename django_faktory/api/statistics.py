"""The numbers of all jobs, queues and workers."""

from __future__ import annotations

from typing import ClassVar

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import ViewSet

from .. import conf
from ..store import stats, workers
from . import answers
from .access import May
from .base import Door, alias
from .described import described

COUNTED = 10_000
"""Jobs of each state that are counted."""


class Numbers(Door, ViewSet):
    """One look at everything."""

    permission_classes = (May,)
    needs: ClassVar = {"list": "overview.view"}

    @described(
        operation_id="statistics_retrieve",
        summary="Show the numbers",
        description="Totals are exact; jobs, queues and batches are counted up to `counted_to`. `/metrics` and INFO "
        "count all of them, at a cost that grows with the jobs that wait.",
        responses=answers.Statistics,
    )
    def list(self, request: Request) -> Response:  # noqa: ARG002
        """One snapshot."""
        using = alias()
        found = stats.bounded(using=using, most=COUNTED)
        return Response(
            {
                **found.totals,
                "sets": found.sets,
                "queues": found.queues,
                "workers": workers.states(using=using, timeout_s=conf.get("WORKER_TIMEOUT")),
                "batches": found.batches,
                "counted_to": COUNTED,
            }
        )
