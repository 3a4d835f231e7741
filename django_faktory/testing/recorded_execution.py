"""Run the worker's own execution of a job in the test's thread, and keep the exception. Imports no model."""

from __future__ import annotations

from contextvars import copy_context
from typing import Any

from asgiref.sync import async_to_sync

from ..brokers.base import WorkerBroker
from ..core.payloads import Failure
from ..tasks import batch
from ..worker.execution import Execution
from ..worker.job_buffer import Report


class RecordedExecution(Execution):
    """One attempt at one job; `error` is the exception of its task. Ctrl-C ends the tests, not only a task."""

    __slots__ = ("error",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.error: BaseException | None = None

    def _build_failure(self, error: BaseException) -> Failure:
        if isinstance(error, KeyboardInterrupt):
            raise error
        self.error = error
        return super()._build_failure(error)

    def perform(self, broker: WorkerBroker) -> Report | None:
        """Run the job in this thread, whether or not its task is a coroutine; see `Execution.run`."""
        with batch.without_batch():  # a batch that this thread is filling must not adopt its jobs
            # The ORM calls of a coroutine use this thread's connections, and so the test's transaction. In a copy of
            # the context, because async_to_sync passes context variables back to its caller.
            return copy_context().run(async_to_sync(self.arun), broker) if self.is_async else self.run(broker)
