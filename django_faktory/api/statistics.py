"""The numbers of all jobs, queues and workers."""

from __future__ import annotations

from typing import ClassVar

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import ViewSet

from .. import conf, permissions
from ..store import batches, workers
from . import answers
from .access import May
from .base import Door, alias, broker
from .described import described


class Numbers(Door, ViewSet):
    """One look at everything."""

    permission_classes = (May,)
    needs: ClassVar = {"list": permissions.VIEW_STATISTICS}

    @described(
        operation_id="statistics_retrieve",
        summary="Show the numbers",
        description="As INFO tells them. Its cost grows with the jobs that wait: ask every few seconds at most.",
        responses=answers.Statistics,
    )
    def list(self, request: Request) -> Response:  # noqa: ARG002
        """One snapshot."""
        using = alias()
        info = broker().info()
        return Response(
            {
                "processed": info["total_processed"],
                "failed": info["total_failures"],
                "late": info["total_late"],
                "enqueued": info["total_enqueued"],
                "sets": info["sets"],
                "queues": info["total_queues"],
                "workers": workers.states(using=using, timeout_s=conf.get("WORKER_TIMEOUT")),
                "batches": batches.unfinished(using=using),
            }
        )
