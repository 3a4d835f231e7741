"""The loops that run beside a process's main one: upkeep, the outbox, the sums."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Protocol, Self

JOIN_S = 2.0
LOOK_S = 0.05


class Loop(Protocol):
    """`run` is a thread's; `stop` may be called from any, and lets it return soon."""

    def run(self) -> None:
        """Loop until stopped."""

    def stop(self) -> None:
        """Ask the loop to end."""


class Beside:
    """`with Beside() as beside:` what was started inside is stopped and waited for at its end, the last one first."""

    def __init__(self) -> None:
        self._is_over = False
        self._running: list[tuple[Loop, threading.Thread]] = []

    def start(self, loop: Loop | None, name: str, *, after: threading.Event | None = None) -> None:
        """Run a loop in a thread, once `after` is set, if ever; None: there is none to run."""
        if loop is None:
            return

        def run() -> None:
            while after and not after.wait(LOOK_S):
                if self._is_over:
                    return
            loop.run()

        thread = threading.Thread(target=run, name=f"faktory-{name}", daemon=True)
        self._running.append((loop, thread))
        thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over = True
        for loop, _ in reversed(self._running):
            loop.stop()
        for _, thread in reversed(self._running):
            thread.join(JOIN_S)
