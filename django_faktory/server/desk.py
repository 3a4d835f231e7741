"""Where lines that take long are read: in steps of a few milliseconds, so that others are served in between.

All that are being read take turns, and together leave half of the event loop's time to the others, where there are
any. How much is read and carried out at a time is bounded, as a line's jobs take ten times its own memory; who comes
later waits as bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import FaktoryError
from ..jsonsteps import Steps
from ..logs import get_logger

logger = get_logger(__name__)

STEP_S = 0.002
"""How long one turn goes on."""

AT_ONCE_S = 0.05
"""So much is read before the desk rests: a client that sends a thousand jobs now and then waits for nothing."""

OTHERS_S = 1.0
"""Who has sent a short command within so long is one of the others."""

HUGE_BYTES = 1024 * 1024
"""Lines longer than this wait for each other, and nobody else for them."""

ROOM_BYTES = 16 * 1024 * 1024
"""Of lines that are worked on at a time; the same again of huge ones, or a single one that is larger."""


class Place:
    """One line's. It is left when its command has been answered, or nobody waits for it any more."""

    def __init__(self, room: Room, steps: Steps[Any], size: int, done: Callable[[Any], object]) -> None:
        self.steps, self.size, self.done = steps, size, done
        self.is_read = False
        self._room = room

    def leave(self) -> None:
        """Let the next one have it."""
        self.steps.close()
        self._room.leaves(self)

    def give_up(self) -> None:
        """The client is gone: read no further. What is being carried out keeps its place until it is done."""
        if not self.is_read:
            self._room.gives_up(self)


class Room:
    """Places of lines that weigh no more than `most` together, or one, whatever it weighs."""

    def __init__(self, most: int, begin: Callable[[Place], None], later: Callable[[Callable[[], None]], None]) -> None:
        self._most, self._begin, self._later = most, begin, later
        self.waiting_bytes = 0
        self._waiting: dict[Place, None] = {}
        self._inside: set[Place] = set()
        self._size = 0

    def enters(self, place: Place) -> None:
        """One more, now or later."""
        self._waiting[place] = None
        self.waiting_bytes += place.size
        self._next()

    def leaves(self, place: Place) -> None:
        """One is done."""
        if place in self._waiting:
            del self._waiting[place]
            self.waiting_bytes -= place.size
        if place in self._inside:
            self._inside.remove(place)
            self._size -= place.size
        self._next()

    def gives_up(self, place: Place) -> None:
        """The same for one that is not read to its end: its line is freed when there is time for that."""
        self._later(place.steps.close)
        self.leaves(place)

    def _next(self) -> None:
        while self._waiting:
            place = next(iter(self._waiting))
            if self._inside and self._size + place.size > self._most:
                return
            del self._waiting[place]
            self.waiting_bytes -= place.size
            self._inside.add(place)
            self._size += place.size
            self._begin(place)


class Desk:
    """Reads lines in steps; calls each one's `done` with the command, or with why there is none.

    `commands` returns how many commands were carried out: those that were not read here are the others'. `later` calls
    a function when there is time for it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        commands: Callable[[], int],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        self._loop, self._commands = loop, commands
        self._counted = 0
        self._others_at = float("-inf")
        self._long = Room(ROOM_BYTES, self._begin, later)
        self._huge = Room(ROOM_BYTES, self._begin, later)
        self._reading: deque[Place] = deque()
        self._is_turning = False
        self._busy_s, self._at = 0.0, 0.0
        self._owed = 0
        self._is_free = asyncio.Event()
        self._is_free.set()

    @property
    def waiting_bytes(self) -> int:
        """The length of all lines that wait until they are read."""
        return self._long.waiting_bytes + self._huge.waiting_bytes

    def take(self, steps: Steps[Any], size: int, done: Callable[[Any], object]) -> Place:
        """Have this read as soon as there is room."""
        room = self._huge if size > HUGE_BYTES else self._long
        place = Place(room, steps, size, done)
        room.enters(place)
        return place

    def go_on(self, steps: Steps[None]) -> None:
        """Have this done in turn with what is read: what is left to do for a long command."""
        self._owed += 1
        self._is_free.clear()
        self._begin(Place(self._long, steps, 0, self._went_on))

    async def drained(self) -> None:
        """Wait until what was to go on is done; what is only being read is not waited for."""
        await self._is_free.wait()

    def _went_on(self, told: FaktoryError | None) -> None:
        self._owed -= 1
        if not self._owed:
            self._is_free.set()
        if told:
            logger.error("command failed item=%s", told)

    def _begin(self, place: Place) -> None:
        self._reading.append(place)
        if not self._is_turning:
            self._is_turning = True
            self._loop.call_soon(self._turn)  # and not at once: who asks is in the middle of something

    def _turn(self) -> None:
        place = self._reading.popleft()
        begun = self._loop.time()
        if self._commands() != self._counted:
            self._others_at = begun
        try:
            self._read(place, begun + STEP_S)
        finally:
            self._counted = self._commands()
            self._is_turning = bool(self._reading)
            rest_s = self._rest_s(self._loop.time() - begun)
            if self._reading:
                self._loop.call_later(rest_s, self._turn)

    def _read(self, place: Place, until: float) -> None:
        try:
            while self._loop.time() < until:
                next(place.steps)
        except StopIteration as end:
            place.is_read = True
            place.done(end.value)  # None where it was given up
        except FaktoryError as error:
            place.is_read = True
            place.done(error)
        except Exception:  # this line's own: the others' are read on, and its client gets an answer
            logger.exception("command failed item=%s", "long line")
            place.is_read = True
            place.done(FaktoryError("internal error"))
        else:
            self._reading.append(place)

    def _rest_s(self, took_s: float) -> float:
        """As long as the turn was, unless there was much rest lately, or nobody is there for whom to rest."""
        now = self._loop.time()
        self._busy_s = max(0.0, self._busy_s - (now - self._at)) + 2 * took_s
        self._at = now
        return took_s if self._busy_s > AT_ONCE_S and now - self._others_at < OTHERS_S else 0.0
