"""The worker's own execution of a job, in the test's thread, with what went wrong at hand. Imports no model."""

from __future__ import annotations

from typing import Any, cast

from asgiref.sync import async_to_sync

from .. import batches
from ..brokers.base import Broker
from ..payloads import Ack, Failure
from ..worker.execute import Execution


class Watched(Execution):
    """One attempt at one job; `error` is what its task raised. Ctrl-C ends the tests, not a task."""

    __slots__ = ("error",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.error: BaseException | None = None

    def _failed(self, error: BaseException) -> Failure:
        if isinstance(error, KeyboardInterrupt):
            raise error
        self.error = error
        return super()._failed(error)

    def perform(self, broker: Broker) -> Ack | Failure | None:
        """Run the job here and now, a coroutine too; see `Execution.run`."""
        with batches.in_none():  # a batch that is being filled in this thread is none of its business
            # What a coroutine does with the ORM is done on this thread's connections.
            report = async_to_sync(self.arun)() if self.is_async else self.run(broker)
        return cast("Ack | Failure | None", report)  # no worker stops here, so that nothing is interrupted
