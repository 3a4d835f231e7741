"""Write the progress of jobs from a thread of its own (`ProgressWriter`).

A task never waits for a write, even if it reports a million times, in a transaction or on the event loop. About one
write a second stores the latest progress of each job; the last one of a job is always written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from ..brokers.base import WorkerBroker
from ..core.job_control import Part
from ..core.logs import get_logger
from ..core.payloads import MAX_DESC_BYTES, Reservation, TrackUpdate, cut
from ..errors import FaktoryError
from ..store.outages import of_this_node

logger = get_logger(__name__)

WRITE_EVERY_S = 1.0
"""Minimum seconds between two writes."""

SETTLE_S = 2.0
"""Seconds that the end of a job waits for a running write of its earlier progress."""

IDLE_S = 10.0
"""Seconds without progress after which the connection is closed."""


class ProgressWriter:
    """Writer of progress for one worker process. Its thread starts with the first call of `report_progress`."""

    def __init__(self, broker: WorkerBroker, *, write_every_s: float = WRITE_EVERY_S) -> None:
        self._broker = broker
        self._write_every_s = write_every_s
        self._latest: dict[str, TrackUpdate] = {}
        self._writing: dict[str, TrackUpdate] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def report_progress(self, job: Reservation, percent: int, note: str, part: Part = None) -> None:
        """Store this progress for the next write; it replaces earlier progress of the job. Does not block."""
        desc = cut(note, MAX_DESC_BYTES)
        update = TrackUpdate(jid=job.jid, wid=job.wid, attempt=job.attempt, percent=percent, desc=desc, part=part)
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="faktory-progress", daemon=True)
                self._thread.start()
            self._latest[job.jid] = update
            self._changed.notify_all()

    def settle(self, jids: Collection[str]) -> None:
        """Write the latest progress of these jobs. Call it before their ends are reported.

        After the end the broker would refuse the progress. Sends nothing if there is no new progress.
        """
        # Without the lock: these jobs have ended, so they report no further progress.
        if not self._latest and not self._writing:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._writing.keys().isdisjoint(jids), SETTLE_S)
            updates = [self._latest.pop(jid) for jid in jids if jid in self._latest]
        if updates:
            self._write(updates)

    def take(self, jid: str) -> TrackUpdate | None:
        """Return the unwritten progress of this job, for a task that writes it in its own transaction.

        Progress that is being written at this moment is returned too: writing it twice does no harm.
        """
        with self._changed:
            return self._latest.pop(jid, None) or self._writing.get(jid)

    def close(self, timeout_s: float) -> None:
        """Write the remaining progress and end the thread; wait up to `timeout_s`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._latest or self._is_closed, IDLE_S):
                    self._broker.close()
                    continue
                # Swapped, so that tasks can report progress during the write.
                self._writing, self._latest = self._latest, {}
            # Woken without progress: the writer is closed.
            if not self._writing:
                break
            self._write(list(self._writing.values()))
            with self._changed:
                self._writing = {}
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_closed, self._write_every_s)
        self._broker.close()

    def _write(self, updates: list[TrackUpdate]) -> None:
        try:
            self._broker.track_set(updates)
        except FaktoryError as error:  # not retried: later progress of these jobs replaces it
            of_this_node.record_failure("progress", error)
        except Exception:  # the loop must survive any error
            logger.exception("progress could not be written count=%d", len(updates))
            self._broker.close()
            time.sleep(self._write_every_s)
