"""Sleeps of a job, and its waits for signals: the run ends, and a later run continues behind them (ADR 0052).

Contract: `docs/long-jobs.md`. `JobContext` offers both to tasks.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from ..core.steps import FOREVER, StepRecord
from ..errors import InvalidStep, Later, WaitTimedOut, wait_s
from .steps import Steps, check_place, refuse_coroutine


class Parked(Later):
    """Ends a run that sleeps or waits."""

    def __init__(self, pause: tuple[str, str], in_s: float | None, waits_for: str | None) -> None:
        self.pause, self.in_s, self.waits_for = pause, in_s, waits_for
        within = "" if in_s is None else f" for {in_s:g} s"
        BaseException.__init__(self, f"waits{within} for signal {waits_for!r}" if waits_for else f"sleeps{within}")


class JobPause:
    """A sleep of a job, or a wait for a signal of this name."""

    kind = "pause"

    def __init__(self, steps: Steps, verb: str, name: str, key: object, duration: timedelta | float | None) -> None:
        self.name, self.key = check_place(verb, name, key)
        self._steps, self._verb = steps, verb
        try:
            self._in_s = None if duration is None else wait_s(duration)
        except ValueError as error:
            raise InvalidStep(f"{self}: {error}") from None

    def __str__(self) -> str:
        return f"{self._verb} {self.name!r}" + (f" with key {self.key!r:.80}" if self.key else "")

    def sleep(self) -> None:
        """Return if the time is over, else end the run. Raises InvalidStep."""
        refuse_coroutine(self, "write `await context.asleep(…)`")
        record = self._enter()
        if not record.is_finished:
            self._steps.refuse_transaction(self)
            self._finish(record, None)

    def wait(self) -> Any:
        """Return the payload of the signal, or end the run if there is none. Raises WaitTimedOut, InvalidStep."""
        refuse_coroutine(self, f"write `await context.await_for({self.name!r})`")
        record = self._enter()
        if record.is_finished:
            payload = self._steps.read_result(self)
        else:
            payload = self._finish(record, self._steps.find_signal(self), waits_for=self.name)
        if payload is None:
            raise WaitTimedOut(f"{self}: no signal came before the time-out")
        return self._steps.unseal(payload)

    def _enter(self) -> StepRecord:
        return self._steps.enter(self) or StepRecord(name=self.name, key=self.key, until=FOREVER, is_finished=False)

    def _finish(
        self, record: StepRecord, signal: tuple[int, str] | None, *, waits_for: str | None = None
    ) -> str | None:
        """Record the end as a step, with the payload of the signal, which is returned; before the end, end the run."""
        if signal is None and not record.is_over:
            self._steps.end(Parked((self.name, self.key), self._in_s, waits_for))
        payload = None if signal is None else self._steps.seal(self._steps.unseal(signal[1]))
        # Although time tells that it is over: a clock that is set back must not begin it again.
        finished = replace(record, result=payload, is_finished=True)
        with self._steps.committing(self, lambda: finished):
            if signal is not None:
                self._steps.take_signal(signal[0])
        return payload
