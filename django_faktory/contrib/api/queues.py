"""Queues over the REST API: size and latency; pause, resume, clear."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from rest_framework.request import Request
from rest_framework.response import Response

from ...brokers import get_broker
from ...errors import FaktoryError
from ...models import Queue
from ...operations import queue_sizes
from ...operations.rows import QueueRow
from . import answers
from .base import Resource, get_alias
from .described import describe_action
from .filters import QueueFilterSet
from .paging import FewByName

CLEARS_FOR_S = 5.0
"""Seconds after which a request to clear stops between two steps and reports that jobs are left."""


class Queues(Resource):
    """Queues that have been used at least once."""

    queryset = Queue.objects.none()
    serializer_class = answers.Queue
    pagination_class = FewByName
    filterset_class = QueueFilterSet
    lookup_field = "name"
    resource = "queue"
    docs: ClassVar = {"list": "List queues by name.", "retrieve": "Show a queue."}
    clears_for_s = CLEARS_FOR_S

    def serialize(self, rows: Any) -> Any:
        """Return the queues with their sizes and latencies."""
        waiting = queue_sizes.read([queue.name for queue in rows], using=get_alias())
        return [
            QueueRow.read(queue, size=found.size, latency_s=round(found.latency_s, 3))
            for queue in rows
            for found in (waiting[queue.name],)
        ]

    @describe_action(answers.Queue, shows_row=True)
    def pause(self, request: Request, **_: Any) -> Response:
        """Pause a queue.

        Workers get no jobs from it; running jobs continue.
        """
        queue = self.read_action()
        # Through the broker, so that it has the effects of the protocol's QUEUE PAUSE (W24).
        get_broker().pause([queue.name], by=str(request.user), reason=self.reason)
        return self._finish_action(queue, "Paused")

    @describe_action(answers.Queue, shows_row=True)
    def resume(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Resume a queue.

        Workers get its jobs again.
        """
        queue = self.read_action()
        get_broker().resume([queue.name])
        return self._finish_action(queue, "Resumed")

    @describe_action(answers.ClearedQueue)
    def clear(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Clear a queue.

        Discard its enqueued jobs, and delete the queue and its pause. The request stops after 5 seconds.
        """
        queue = self.read_action()
        deadline, stopped = time.monotonic() + self.clears_for_s, []

        # The broker calls it between two steps; the finished steps are committed.
        def should_continue() -> bool:
            if time.monotonic() > deadline:
                stopped.append(True)
            return not stopped

        try:
            # Raises FaktoryError if `should_continue` returns False: after `clears_for_s` that is no error.
            get_broker().remove([queue.name], should_continue=should_continue)
        except FaktoryError:
            if not stopped:
                raise
        # After a part too: these jobs are gone, whether or not the client repeats the request.
        self.record(queue, "Cleared in part" if stopped else "Cleared")
        return Response({"is_done": not stopped})

    def _finish_action(self, queue: Queue, summary: str) -> Response:
        self.record(queue, summary)
        # The broker changed the row in the database, not this object.
        queue.refresh_from_db()
        return self.respond(lambda: self.serialize_one(queue))
