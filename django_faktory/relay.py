"""Hands on what waits in the outbox, where callers could not: the target was away, or their process ended too soon.

One loop, on every node; who comes second finds the rows leased. Knows no job.
"""

from __future__ import annotations

import threading

from django.db import connections

from . import brokers
from .brokers.outbox import Outbox
from .errors import BrokerUnavailable
from .logs import get_logger

logger = get_logger(__name__)

EVERY_S = 1.0
LONGEST_PAUSE_S = 15.0


class Relay:
    """The loop; `run` is a thread's."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._stopping = threading.Event()

    def run(self) -> None:
        """Look once a second until stopped; a target that is away is tried ever more seldom."""
        pause_s = EVERY_S
        while not self._stopping.is_set():
            pause_s = EVERY_S if self.run_once() else min(pause_s * 2, LONGEST_PAUSE_S)
            self._stopping.wait(pause_s)
        self._outbox.target.close()
        for alias in self._outbox.aliases:
            connections[alias].close()

    def run_once(self) -> bool:
        """Hand on what waits now; False where some of it could not be."""
        answers = [self._relay(alias) for alias in self._outbox.aliases]  # each, whatever the others say
        return all(answers)

    def stop(self) -> None:
        """Ask the loop to end; from any thread or a signal handler."""
        self._stopping.set()

    def _relay(self, alias: str) -> bool:
        try:
            count = self._outbox.relay(alias)
        except BrokerUnavailable as error:
            logger.warning("the outbox waits for its target alias=%s error=%s", alias, error)
            return False
        except Exception:  # a loop: says what happened, and goes on
            logger.exception("the outbox could not be relayed alias=%s", alias)
            connections[alias].close()
            return False
        if count:
            logger.info("outbox relayed alias=%s jobs=%d", alias, count)
        return True


def relay() -> Relay | None:
    """The relay that this project's settings ask for; None where transactions reach the jobs themselves."""
    producer = brokers.get_producer()
    return Relay(producer) if isinstance(producer, Outbox) else None
