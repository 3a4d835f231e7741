"""Parse long command lines in steps of a few milliseconds, so that other clients are served in between.

`CommandScheduler` runs the steps of all long lines in turn, and leaves half of the event loop's time to clients with
short commands, if there are any. A `MemoryBudget` bounds the lines that are parsed and executed at a time, as the jobs
of a line take ten times its memory; later lines wait as bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from ..core.json.incremental import Incremental
from ..core.logs import get_logger
from ..errors import FaktoryError
from .tuning import DEFAULT_TUNING

logger = get_logger(__name__)

STEP_S = 0.002
"""Seconds that one line is parsed before the next one continues."""

AT_ONCE_S = 0.05
"""Seconds of parsing before the first pause: a client that sends a thousand jobs now and then is not slowed down."""

PAUSING_S = 1.0
"""Seconds after a short command during which the scheduler pauses between steps, for clients with short commands."""

HUGE_BYTES = 1024 * 1024
"""Lines longer than this have a memory budget of their own, so that shorter lines do not wait for them."""


class PendingCommand:
    """The share of one long line in a memory budget, from its arrival until its command is answered or dropped."""

    def __init__(self, budget: MemoryBudget, steps: Incremental[Any], size: int, done: Callable[[Any], object]) -> None:
        self.steps, self.size, self.done = steps, size, done
        self.is_read = False
        self._budget = budget

    def leave(self) -> None:
        """Return the memory to the budget, which admits the next line."""
        self.steps.close()  # frees the line if its parsing was not finished
        self._budget.release(self)

    def give_up(self) -> None:
        """Stop parsing, since the client has disconnected; a running command keeps its share until it ends."""
        if not self.is_read:
            self._budget.abandon(self)


class MemoryBudget:
    """Memory budget: admits lines of at most `limit` bytes together, or a single line of any size."""

    def __init__(
        self, limit: int, begin: Callable[[PendingCommand], None], later: Callable[[Callable[[], None]], None]
    ) -> None:
        self._limit, self._begin, self._later = limit, begin, later
        self.waiting_bytes = 0
        self._waiting: dict[PendingCommand, None] = {}
        self._inside: set[PendingCommand] = set()
        self._bytes_inside = 0

    def admit_in_turn(self, pending: PendingCommand) -> None:
        """Admit a line now, or later in order of arrival."""
        self._waiting[pending] = None
        self.waiting_bytes += pending.size
        self._next()

    def release(self, pending: PendingCommand) -> None:
        """Remove a line that is done, admitted or not, and admit waiting ones."""
        if pending in self._waiting:
            del self._waiting[pending]
            self.waiting_bytes -= pending.size
        if pending in self._inside:
            self._inside.remove(pending)
            self._bytes_inside -= pending.size
        self._next()

    def abandon(self, pending: PendingCommand) -> None:
        """Remove a line that was not parsed to its end; its memory is freed later, in `Intake`."""
        self._later(pending.steps.close)
        self.release(pending)

    def _next(self) -> None:
        while self._waiting:
            pending = next(iter(self._waiting))
            # In order of arrival: if smaller lines overtook it, a large one could wait indefinitely. A line beyond the
            # budget is admitted alone.
            if self._inside and self._bytes_inside + pending.size > self._limit:
                return
            del self._waiting[pending]
            self.waiting_bytes -= pending.size
            self._inside.add(pending)
            self._bytes_inside += pending.size
            self._begin(pending)


class CommandScheduler:
    """Scheduler of long lines: calls each line's `done` with the command, or with the error that rejects it.

    `commands` returns the number of executed commands, from which short ones are detected. `later` calls a function
    in a later iteration of the loop. Used on the event loop only.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        commands: Callable[[], int],
        later: Callable[[Callable[[], None]], None],
        budget_bytes: int = DEFAULT_TUNING.long_lines_bytes,
    ) -> None:
        self._loop, self._count_commands = loop, commands
        self._last_count = 0
        self._short_command_at = float("-inf")
        self._long = MemoryBudget(budget_bytes, self._begin, later)
        self._huge = MemoryBudget(budget_bytes, self._begin, later)
        self._reading: deque[PendingCommand] = deque()
        self._is_scheduled = False
        self._busy_s, self._busy_at = 0.0, 0.0
        self._running_commands = 0
        self._is_free = asyncio.Event()
        self._is_free.set()

    @property
    def waiting_bytes(self) -> int:
        """Total length of the lines that wait for a memory budget."""
        return self._long.waiting_bytes + self._huge.waiting_bytes

    def take(self, steps: Incremental[Any], size: int, done: Callable[[Any], object]) -> PendingCommand:
        """Parse a line as soon as its budget admits it. Call `leave` or `give_up` of the result at the end."""
        budget = self._huge if size > HUGE_BYTES else self._long
        pending = PendingCommand(budget, steps, size, done)
        budget.admit_in_turn(pending)
        return pending

    def run_steps(self, steps: Incremental[None]) -> None:
        """Run the remaining steps of a long command in turn with the parsing of lines."""
        self._running_commands += 1
        self._is_free.clear()
        # Size 0: the memory of the command is counted since its parsing.
        self._begin(PendingCommand(self._long, steps, 0, self._on_steps_done))

    async def wait_idle(self) -> None:
        """Wait until all steps given to `run_steps` are done; does not wait for lines that are being parsed."""
        await self._is_free.wait()

    def _on_steps_done(self, error: FaktoryError | None) -> None:
        self._running_commands -= 1
        if not self._running_commands:
            self._is_free.set()
        if error:
            logger.error("command failed item=%s", error)

    def _begin(self, pending: PendingCommand) -> None:
        self._reading.append(pending)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run_step)  # not now: the caller may be in the middle of changing its state

    def _run_step(self) -> None:
        pending = self._reading.popleft()
        begun = self._loop.time()
        # Commands since the end of the last step were short ones, so there are clients to pause for.
        if self._count_commands() != self._last_count:
            self._short_command_at = begun
        try:
            self._read(pending, begun + STEP_S)
        finally:  # also after an error in a callback, or no further line would be parsed
            self._last_count = self._count_commands()
            self._is_scheduled = bool(self._reading)
            rest_s = self._rest_s(self._loop.time() - begun)
            if self._reading:
                self._loop.call_later(rest_s, self._run_step)

    def _read(self, pending: PendingCommand, until: float) -> None:
        try:
            while self._loop.time() < until:
                next(pending.steps)
        except StopIteration as end:
            pending.is_read = True
            pending.done(end.value)  # None if its parsing was abandoned
        except FaktoryError as error:
            pending.is_read = True
            pending.done(error)
        except Exception:  # affects this line only: parsing of other lines continues, and its client gets a reply
            logger.exception("command failed item=%s", "long line")
            pending.is_read = True
            pending.done(FaktoryError("internal error"))
        else:
            self._reading.append(pending)

    def _rest_s(self, took_s: float) -> float:
        """Return the pause after a step: its duration, or 0 if the loop was idle lately or only long lines come."""
        # A leaky bucket: parsing fills it at twice its duration, time drains it.
        now = self._loop.time()
        self._busy_s = max(0.0, self._busy_s - (now - self._busy_at)) + 2 * took_s
        self._busy_at = now
        return took_s if self._busy_s > AT_ONCE_S and now - self._short_command_at < PAUSING_S else 0.0
