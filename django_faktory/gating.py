"""Limits as arithmetic: what a limit says, how a gate counts, and whom it lets pass. Source: ADR 0016; docs/limits.md.

Pure: knows no Django, and no clock but the time it is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from math import floor

import msgspec

from .errors import FaktoryError

SET_S = 0.1
"""What waits for a rate is let go in sets, so long apart: a hundred a second are ten sets of ten."""

SAVED_S = 0.4
"""So much of a rate is saved up while nobody asks, unless `burst` says otherwise: 4 % of what ten seconds let pass."""

FORGIVEN_S = 2.0
"""A set that is let go later than it should be is as much larger: a node looks each second, and sooner if it knows."""

MOST = 2**31 - 1
LONGEST_PER_S = 31 * 86_400
_ALMOST = 1e-6
_UNITS = {"s": 1, "second": 1, "m": 60, "minute": 60, "h": 3600, "hour": 3600, "d": 86_400, "day": 86_400}
_RATE = re.compile(r"([0-9]{1,10}) ?/ ?([0-9]{0,7}) ?([a-z]+)")
_KEYS = ("concurrency", "rate", "burst")


class Scope(StrEnum):
    """What a limit is for."""

    QUEUE = "queue"
    TASK = "task"
    KEY = "key"


class InvalidLimit(FaktoryError):
    """A limit that says nothing, or what cannot be."""


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """What a limit allows: so many at a time, so many to start in so many seconds, or both."""

    concurrency: int | None = None
    rate: int | None = None
    per: int = 1
    burst: int | None = None
    """How many may start at once after a rest; None: what `SAVED_S` brings, one at least."""

    @classmethod
    def of(cls, value: object) -> Allowance:
        """Read `5`, `"100/s"`, or `{"concurrency": 5, "rate": "10/m", "burst": 3}`. Raises InvalidLimit."""
        if isinstance(value, Allowance):
            return value
        if isinstance(value, str):
            return cls.of({"rate": value})
        if not isinstance(value, Mapping):
            return cls(concurrency=_whole("concurrency", value))
        for key in value:
            if key not in _KEYS:
                raise InvalidLimit(f"no such key: {key!r:.80}; known: {', '.join(_KEYS)}")
        concurrency, told, burst = (value.get(key) for key in _KEYS)
        if concurrency is None and told is None:
            raise InvalidLimit('expected "concurrency", "rate" or both, got neither')
        if burst is not None and told is None:
            raise InvalidLimit("burst: expected a rate beside it, got none")
        rate: int | None = None
        per = 1
        if told is not None:
            rate, per = _rate(told)
        return cls(
            concurrency=None if concurrency is None else _whole("concurrency", concurrency),
            rate=rate,
            per=per,
            burst=None if burst is None else _whole("burst", burst),
        )

    @property
    def per_second(self) -> float:
        """Tokens that come in a second."""
        return self.rate / self.per if self.rate else 0.0

    @property
    def capacity(self) -> float:
        """Tokens that are saved up at most."""
        return float(self.burst) if self.burst else max(1.0, self.per_second * SAVED_S)

    def __str__(self) -> str:
        parts = [] if self.concurrency is None else [f"{self.concurrency} at a time"]
        if self.rate is not None:
            parts.append(rate_text(self.rate, self.per) + (f", {self.burst} at once" if self.burst else ""))
        return " and ".join(parts)


def rate_text(rate: int, per: int) -> str:
    """As `Allowance.of` reads it."""
    unit, seconds = next((pair for pair in (("d", 86_400), ("h", 3600), ("m", 60)) if per % pair[1] == 0), ("s", 1))
    return f"{rate}/{'' if per == seconds else per // seconds}{unit}"


def _rate(value: object) -> tuple[int, int]:
    match = _RATE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if not match or match[3] not in _UNITS:
        raise InvalidLimit(f'rate: expected a number and a time, such as "100/s", "10/m" or "5/30s", got {value!r:.80}')
    rate, per = int(match[1]), int(match[2] or 1) * _UNITS[match[3]]
    if not 1 <= rate <= MOST or not 1 <= per <= LONGEST_PER_S:
        raise InvalidLimit(
            f"rate: expected 1 to {MOST} in a second to {LONGEST_PER_S // 86_400} days, got {value!r:.80}"
        )
    return rate, per


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        raise InvalidLimit(f"{name}: expected a whole number from 1 to {MOST}, got {value!r:.80}")
    return value


class Gate(msgspec.Struct, kw_only=True):
    """A limit at work: what it counts, as its row has it. Changed only while that row is locked."""

    id: int
    scope: str = Scope.TASK
    name: str = ""
    allows: Allowance
    is_paused: bool = False
    in_use: int = 0
    tokens: float = 0.0
    filled_at: datetime
    opens_at: datetime | None = None
    is_awaited: bool = False
    """Whether jobs are parked at it."""

    @property
    def has_rate(self) -> bool:
        """Whether it counts starts."""
        return self.allows.rate is not None

    @property
    def room(self) -> int:
        """How many may pass now."""
        rooms = [MOST if self.allows.concurrency is None else self.allows.concurrency - self.in_use]
        if self.has_rate:
            rooms.append(floor(self.tokens + _ALMOST))
        return 0 if self.is_paused else max(0, min(rooms))

    def fill(self, now: datetime) -> None:
        """Add the tokens that came since. While jobs wait for a set, it is theirs: none are added before its time."""
        if not self.has_rate or (self.opens_at is not None and now < self.opens_at):
            return
        came_s = max(0.0, (now - self.filled_at).total_seconds())
        late_s = min((now - self.opens_at).total_seconds(), FORGIVEN_S) if self.opens_at else 0.0
        most = max(self.allows.capacity + late_s * self.allows.per_second, self.tokens)
        self.tokens = min(self.tokens + came_s * self.allows.per_second, most)
        self.filled_at = max(now, self.filled_at)
        self.opens_at = None

    def take(self) -> None:
        """Let one pass."""
        self.in_use += self.allows.concurrency is not None
        if self.has_rate:
            self.tokens -= 1

    def wait_for_tokens(self, now: datetime) -> None:
        """Say when the next set is let go, if it is tokens that are missing."""
        if not self.has_rate or self.is_paused or self.opens_at is not None or floor(self.tokens + _ALMOST) >= 1:
            return
        wanted = max(1.0, min(self.allows.per_second * SET_S, self.allows.capacity))
        self.opens_at = now + timedelta(seconds=max(0.0, wanted - self.tokens) / self.allows.per_second)

    def wait_for_next(self, now: datetime, *, has_let_go: bool) -> None:
        """Say when the set after this one is let go; where nobody takes what was let go, there is no hurry."""
        if self.has_rate and not self.is_paused:
            wanted = max(1.0, min(self.allows.per_second * SET_S, self.allows.capacity))
            self.opens_at = now + timedelta(seconds=wanted / self.allows.per_second if has_let_go else 1.0)

    def holds_passes(self) -> bool:
        """Whether who passes has a place to give back."""
        return self.allows.concurrency is not None


def allot(wanted: Iterable[Sequence[Gate]], now: datetime) -> list[Gate | None]:
    """Let jobs just claimed pass, each by its gates, in their order: None, or the gate that one is refused by.

    Each takes a place of all its gates, or of none. A gate that is nobody's but a queue's refuses last: what it holds
    back need not be parked.
    """
    answers: list[Gate | None] = []
    for gates in wanted:
        for gate in gates:
            if gate.opens_at is None or gate.scope == Scope.QUEUE:  # else what comes is theirs that are parked
                gate.fill(now)
        shut = [gate for gate in gates if gate.room < 1]
        if not shut:
            for gate in gates:
                gate.take()
        else:
            for gate in shut:
                gate.wait_for_tokens(now)
        answers.append(next((gate for gate in shut if gate.scope != Scope.QUEUE), shut[0] if shut else None))
    return answers


def family_of(key: str) -> str:
    """The name of the limit that all keys of a kind share: what is before the first colon."""
    return key.partition(":")[0]


def passes_text(gates: Iterable[Gate]) -> str | None:
    """As a job keeps the passes that it is to give back; None for none."""
    held = [str(gate.id) for gate in gates if gate.holds_passes()]
    return f",{','.join(held)}," if held else None


def passes_of(text: str | None) -> list[int]:
    """The gates whose passes a job holds."""
    return [int(one) for one in text.split(",") if one] if text else []
