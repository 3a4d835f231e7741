"""Worker processes over the REST API, in any language: list and show them, quiet or terminate one."""

from __future__ import annotations

from typing import Any, ClassVar

from rest_framework.request import Request
from rest_framework.response import Response

from ... import conf
from ...models import WorkerProcess
from ...operations.serializers import read_workers
from ...store import workers as store_workers
from . import answers
from .base import Resource, get_alias
from .described import describe_action
from .filters import WorkerFilter
from .paging import ByWid


class Workers(Resource):
    """Live worker processes: seen recently, or holding jobs."""

    queryset = WorkerProcess.objects.none()
    serializer_class = answers.Worker
    pagination_class = ByWid
    filterset_class = WorkerFilter
    lookup_field = "wid"
    resource = "workerprocess"
    docs: ClassVar = {"list": "List live worker processes.", "retrieve": "Show a worker process."}

    def get_queryset(self) -> Any:
        """Return live workers only: the rows of other workers are about to be deleted."""
        # A client that sends no BEAT counts as alive while it holds jobs.
        return super().get_queryset().filter(store_workers.living(conf.get("WORKER_TIMEOUT")))

    def serialize(self, rows: Any) -> Any:
        """Return the workers, each with its number of jobs."""
        return read_workers(rows, using=get_alias())

    @describe_action(answers.ChangeCount)
    def quiet(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Quiet a worker.

        It fetches no more jobs and finishes its running jobs. This cannot be undone.
        """
        return self._advance("quiet")

    @describe_action(answers.ChangeCount)
    def terminate(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Terminate a worker.

        It finishes its running jobs and exits.
        """
        return self._advance("terminate")

    def _advance(self, state: str) -> Response:
        worker = self.read_action()
        # 0 if the worker is in this or a later state already: it never goes back (W21).
        changed = store_workers.advance([worker.wid], state, using=get_alias())
        self.record(worker, f"Sent {state}")
        return Response({"changed": changed})
