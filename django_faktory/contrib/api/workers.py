"""Worker processes over the REST API, in any language: list and show them, quiet or terminate one."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema_view
from rest_framework.request import Request
from rest_framework.response import Response

from ... import conf
from ...models import WorkerProcess
from ...operations.serializers import read_workers
from ...store import workers as store_workers
from . import answers, inputs
from .base import Resource, get_alias
from .described import describe, describe_action
from .filters import WorkerFilter
from .journal import record_change
from .paging import ByWid


@extend_schema_view(
    list=describe(summary="List live worker processes"),
    retrieve=describe(summary="Show a worker process"),
)
class Workers(Resource):
    """Live worker processes: seen recently, or holding jobs."""

    queryset = WorkerProcess.objects.none()
    serializer_class = answers.Worker
    pagination_class = ByWid
    filterset_class = WorkerFilter
    lookup_field = "wid"
    resource = "workerprocess"

    def get_queryset(self) -> Any:
        """Return live workers only: the rows of other workers are about to be deleted."""
        # A client that sends no BEAT counts as alive while it holds jobs.
        return WorkerProcess.objects.using(get_alias()).filter(store_workers.living(conf.get("WORKER_TIMEOUT")))

    def serialize(self, rows: Any) -> Any:
        """Return the workers, each with its number of jobs."""
        return read_workers(rows, using=get_alias())

    @describe_action(
        "Quiet a worker",
        "It fetches no more jobs and finishes its running jobs. This cannot be undone.",
        answers.ChangeCount,
    )
    def quiet(self, request: Request, **_: Any) -> Response:
        """Quiet the worker. It receives its new state in the reply to its next heartbeat."""
        return self._advance(request, "quiet")

    @describe_action("Terminate a worker", "It finishes its running jobs and exits.", answers.ChangeCount)
    def terminate(self, request: Request, **_: Any) -> Response:
        """Terminate the worker. It receives its new state in the reply to its next heartbeat."""
        return self._advance(request, "terminate")

    def _advance(self, request: Request, state: str) -> Response:
        validated, worker = self.read_input(inputs.ReasonSerializer), self.get_object()
        # 0 if the worker is in this or a later state already: it never goes back (W21).
        changed = store_workers.advance([worker.wid], state, using=get_alias())
        record_change(request, worker, f"Sent {state}", reason=validated["reason"])
        return Response({"changed": changed})
