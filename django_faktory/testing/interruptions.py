"""`interrupt_after()`: ends runs after a step, as the shutdown of a worker does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from ..core.steps import StepRecord
from ..errors import WorkerShutdown
from ..tasks.steps import Steps


@contextmanager
def interrupt_after(name: str) -> Iterator[None]:
    """End each run that commits a step of this name, right after the commit; `drain` then runs its job again.

    A run that finds the step recorded goes on, so each job is interrupted once for each step.
    """
    conclude = Steps.conclude

    def conclude_and_end(self: Steps, record: StepRecord) -> None:
        conclude(self, record)
        if record.name == name:
            self.control.end(WorkerShutdown(f"interrupt_after({name!r})"))

    with mock.patch.object(Steps, "conclude", conclude_and_end):
        yield
