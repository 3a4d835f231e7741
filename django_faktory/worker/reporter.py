"""Report the ends of jobs to the broker: a single end at once, the ends of a busy worker in sets (`Reporter`).

While the broker fails, reports are retried until the deadline that `close` sets. Reports not sent by then are logged by
jid, and their jobs run again. Independent of tasks and SQL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ..brokers.base import WorkerBroker
from ..core.logs import get_logger
from ..core.payloads import Ack, Failure, Interruption
from ..errors import BrokerUnavailable, FaktoryError, InvalidResult, JobNotFound
from .job_buffer import Report
from .outage_pause import OutagePause

R = TypeVar("R", Ack, Failure, Interruption)

logger = get_logger(__name__)

MAX_SET = 500
"""Maximum number of reports in one call of the broker."""

LATE_S = 1.0
"""Seconds after which reports that the broker has not recorded count as late."""

LINGER_S = 0.010
"""Seconds that a report waits for the reports of jobs that are about to begin. Measured with tasks of one INSERT, five
threads and two processors: a fifth less CPU time for each job than if each set is sent as soon as the set before is
done. 20 ms gain nothing more.
"""


class Reporter:
    """Send reports in a loop; `run` is the target of a thread.

    A report that the broker cannot process does not delay the reports sent with it.
    """

    def __init__(
        self,
        broker: WorkerBroker,
        finished: SimpleQueue[Report | None],
        *,
        more_soon: Callable[[], bool] = lambda: False,
        acknowledge: Callable[[Sequence[Ack]], Sequence[FaktoryError | bool]] | None = None,
        write_progress: Callable[[Collection[str]], None] = lambda _: None,
        on_reported: Callable[[Sequence[Report]], None] = lambda _: None,
    ) -> None:
        self._broker = broker
        self._acknowledge = acknowledge or broker.ack
        self._write_progress = write_progress
        self._finished = finished
        self._on_reported = on_reported
        self._more_soon = more_soon  # whether more jobs are about to end, so that waiting for them pays
        self._outage_pause = OutagePause("reports")
        self._pause_s = 0.0
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._sending_since = float("inf")
        self.settled_count = 0
        """Number of reports that the broker has recorded or will never accept."""

    def run(self) -> None:
        """Send reports until closed and all are sent, or until the deadline."""
        unsent: list[Report] = []
        while not (self._closing.is_set() and not unsent and self._finished.empty()):
            retried_count = len(unsent)
            unsent += self._gather(MAX_SET - len(unsent), block=not unsent)
            # More jobs are about to end: their reports can share this commit.
            if unsent and not self._closing.is_set() and self._more_soon():
                self._closing.wait(LINGER_S)
                unsent += self._gather(MAX_SET - len(unsent), block=False)
            # Log lines must not delay acknowledgements that are late already, or that have to arrive by the deadline.
            if unsent and not retried_count:
                self._sending_since = time.monotonic()
            if not retried_count and time.monotonic() < self._deadline:
                self._keep_logs(unsent)
            due_count, unsent = len(unsent), self._send(unsent)
            self.settled_count += due_count - len(unsent)
            if not unsent:
                self._sending_since = float("inf")
                continue
            if time.monotonic() >= self._deadline:
                unsent += self._gather(self._finished.qsize(), block=False)
                logger.error("jobs ended and could not be reported: they run again jids=%s", _jids(unsent))
                break
            self._sleep()
        self._broker.close()

    def is_late(self) -> bool:
        """Return whether the broker has not recorded the oldest reports for a while. Safe from any thread."""
        return time.monotonic() - self._sending_since > LATE_S

    def close(self, deadline: float) -> None:
        """End the loop when all reports are sent, or at `deadline` of the monotonic clock. Does not block."""
        self._deadline = deadline
        self._closing.set()
        # Wakes `_gather`, which may wait for the next report.
        self._finished.put(None)

    def _sleep(self) -> None:
        if self._closing.is_set():
            # `_closing` is set by now, so waiting for it would not pause.
            time.sleep(max(0.0, min(self._pause_s, self._deadline - time.monotonic())))
        else:
            self._closing.wait(self._pause_s)

    def _gather(self, limit: int, *, block: bool) -> list[Report]:
        reports: list[Report] = []
        try:
            while len(reports) < limit:
                report = self._finished.get(block and not reports)
                if report is None:
                    break
                reports.append(report)
        except Empty:
            pass
        return reports

    def _keep_logs(self, reports: Sequence[Report]) -> None:
        """Store the log lines of successful runs. No retries: they would delay the acknowledgements."""
        acks = [report for report in reports if isinstance(report, Ack) and report.log]
        if not acks:
            return
        try:
            self._broker.keep_logs(acks)
        except FaktoryError as error:
            logger.warning("log lines could not be stored jids=%s error=%s", _jids(acks), error)
        except Exception:  # the loop must survive any error
            logger.exception("log lines could not be stored jids=%s", _jids(acks))
            self._broker.close()

    def _send(self, reports: Sequence[Report]) -> list[Report]:
        """Send these reports; return the reports to send again."""
        # The broker refuses progress of a job that has ended.
        if reports:
            self._write_progress([report.jid for report in reports])
        acks = [report for report in reports if isinstance(report, Ack)]
        unsent: list[Report] = [*self._deliver(self._acknowledge, acks)]
        if len(acks) < len(reports):
            failures = [report for report in reports if isinstance(report, Failure)]
            interruptions = [report for report in reports if isinstance(report, Interruption)]
            unsent += self._deliver(self._broker.fail, failures)
            unsent += self._deliver(self._broker.interrupt, interruptions)
        return unsent

    def _deliver(self, verb: Callable[[Sequence[R]], Sequence[FaktoryError | bool]], reports: list[R]) -> list[R]:
        if not reports:
            return []
        try:
            answers = verb(reports)
        except BrokerUnavailable as error:
            self._pause_s = self._outage_pause.record_failure(error)
            return reports
        except Exception:  # the loop must survive: halve the set to isolate the report that the broker cannot process
            self._broker.close()
            if len(reports) == 1:
                logger.exception("the broker cannot take this report, its job will run again jid=%s", reports[0].jid)
                self._on_reported(reports)
                return []
            half = len(reports) // 2
            return self._deliver(verb, reports[:half]) + self._deliver(verb, reports[half:])
        self._outage_pause.record_success()
        unsent: list[R] = []
        for report, answer in zip(reports, answers, strict=True):
            if answer is True:
                continue
            if isinstance(answer, BrokerUnavailable):  # the other reports of the set were recorded
                self._pause_s = self._outage_pause.record_failure(answer)
                unsent.append(report)
            else:
                _log_without_effect(report, answer)
        self._on_reported([report for report in reports if report not in unsent] if unsent else reports)
        return unsent


def _log_without_effect(report: Report, answer: Any) -> None:
    report_type = type(report).__name__.lower()
    if answer is False or isinstance(answer, JobNotFound):
        logger.warning("%s came too late, the job is no longer this worker's jid=%s", report_type, report.jid)
    elif isinstance(answer, InvalidResult):
        logger.error("result could not be stored, the job is dead jid=%s error=%s", report.jid, answer)
    else:
        logger.error("%s was refused jid=%s error=%s", report_type, report.jid, answer)


def _jids(reports: Sequence[Report]) -> str:
    return ",".join(report.jid for report in reports)
