"""Run background loops in threads while the main loop of a process runs (`BackgroundLoops`).

Examples are maintenance, the outbox relay and the metrics flusher.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Self

JOIN_S = 2.0
"""Seconds to wait for each thread at the end; the process ends without it after that."""

AFTER_CHECK_S = 0.05
"""Interval of the check whether a loop still has to wait for its `after` event."""


class Loop(ABC):
    """A background loop: `run` is the target of a thread, `stop` makes it return soon."""

    def __init__(self) -> None:
        self._stopping = threading.Event()

    @abstractmethod
    def run(self) -> None:
        """Loop until `stop` is called."""

    def stop(self) -> None:
        """End the loop soon. Safe from any thread and from a signal handler."""
        self._stopping.set()


class BackgroundLoops:
    """Context manager that stops the loops started inside it, the last one first, and joins their threads."""

    def __init__(self) -> None:
        self._is_stopping = False
        self._running: list[tuple[Loop, threading.Thread]] = []

    def start(self, loop: Loop | None, name: str, *, after: threading.Event | None = None) -> None:
        """Run `loop` in a thread, once the event `after` is set, if given. Does nothing if `loop` is None."""
        if loop is None:
            return

        def run() -> None:
            while after and not after.wait(AFTER_CHECK_S):
                if self._is_stopping:
                    return
            loop.run()

        # A daemon thread: a loop that hangs must not keep the process from ending.
        thread = threading.Thread(target=run, name=f"faktory-{name}", daemon=True)
        self._running.append((loop, thread))
        thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._is_stopping = True
        # All loops are stopped before the first is joined, so that they end in parallel.
        for loop, _ in reversed(self._running):
            loop.stop()
        for _, thread in reversed(self._running):
            thread.join(JOIN_S)
