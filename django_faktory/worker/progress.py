"""Writes how far jobs are, from a thread of its own: a task that tells it a million times, in a transaction or on the
event loop, waits for nobody. About one write a second, of the latest of each job; none that was the last is lost."""

from __future__ import annotations

import threading
import time

from ..brokers.base import Broker
from ..control import Part
from ..errors import FaktoryError
from ..logs import get_logger
from ..payloads import MAX_DESC_BYTES, Reservation, TrackUpdate, cut

logger = get_logger(__name__)

WRITE_EVERY_S = 1.0
IDLE_S = 10.0
"""After so long without a word the connection is closed."""


class Progress:
    """Of one worker process; its thread starts with the first word."""

    def __init__(self, broker: Broker, *, write_every_s: float = WRITE_EVERY_S) -> None:
        self._broker = broker
        self._write_every_s = write_every_s
        self._latest: dict[str, TrackUpdate] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def tell(self, job: Reservation, percent: int, note: str, part: Part = None) -> None:
        """Keep this until it is written, or until the next word of this job."""
        update = TrackUpdate(jid=job.jid, wid=job.wid, percent=percent, desc=cut(note, MAX_DESC_BYTES), part=part)
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="faktory-progress", daemon=True)
                self._thread.start()
            self._latest[job.jid] = update
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Write what is left, and end the thread; waits for so long at most."""
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
                updates, self._latest = list(self._latest.values()), {}
            if not updates:
                break
            self._write(updates)
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, self._write_every_s)
        self._broker.close()

    def _write(self, updates: list[TrackUpdate]) -> None:
        try:
            self._broker.track_set(updates)
        except FaktoryError as error:  # the next word of these jobs is a better one
            logger.warning("progress could not be written count=%d error=%s", len(updates), error)
        except Exception:  # a loop
            logger.exception("progress could not be written count=%d", len(updates))
            self._broker.close()
            time.sleep(self._write_every_s)
