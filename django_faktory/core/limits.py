"""Limiter arithmetic: parse limits, count permits and tokens, and decide which jobs pass.

Pure: no Django, and the caller passes the time. The limiter of a queue blocks no job: claims skip the queue until
`opens_at`. `store/limits/limiters.py` applies these rules to rows.

SQL repeats a part of them; also change `store/dialects/postgresql/functions/locks_and_limits.sql`, and
`read_paused_sources` in `store/dialects/portable.py`.
Source: ADR 0016; docs/limits.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from math import floor

import msgspec

from ..errors import TranslatableError, quoted

RELEASE_INTERVAL_S = 0.1
"""Seconds between two releases of jobs that wait for a rate: 100 per second are ten releases of ten jobs."""

SAVED_S = 0.4
"""Seconds whose tokens are saved up while idle, unless `burst` is set: 4 % of the tokens of ten seconds."""

FORGIVEN_S = 2.0
"""Maximum delay in seconds for which a late release is enlarged.

Nodes check once a second, or sooner if they know when tokens arrive; without this, a late check would lose throughput.
"""

# The largest value of an integer column.
MAX_INTEGER = 2**31 - 1
LONGEST_PER_S = 31 * 86_400
_TOLERANCE = 1e-6
_UNITS = {"s": 1, "second": 1, "m": 60, "minute": 60, "h": 3600, "hour": 3600, "d": 86_400, "day": 86_400}
_RATE = re.compile(r"([0-9]{1,10}) ?/ ?([0-9]{0,7}) ?([a-z]+)")
_KEYS = ("concurrency", "rate", "burst")


class Scope(StrEnum):
    """The kind of object a limit applies to."""

    QUEUE = "queue"
    TASK = "task"
    KEY = "key"


class InvalidLimit(TranslatableError):
    """The limit is empty or invalid."""


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """The limit itself: a number of concurrent jobs, a number of starts per period, or both."""

    concurrency: int | None = None
    rate: int | None = None
    per: int = 1
    burst: int | None = None
    """Number of starts at once after an idle period; None: the tokens of `SAVED_S`, at least one."""

    @classmethod
    def of(cls, value: object) -> Allowance:
        """Parse `5`, `"100/s"`, or `{"concurrency": 5, "rate": "10/m", "burst": 3}`. Raises InvalidLimit."""
        if isinstance(value, Allowance):
            return value
        if isinstance(value, str):
            return cls.of({"rate": value})
        if not isinstance(value, Mapping):
            return cls(concurrency=_check_whole("concurrency", value))
        for key in value:
            if key not in _KEYS:
                raise InvalidLimit("no such key: %(key)s; known: %(known)s", key=quoted(key), known=", ".join(_KEYS))
        concurrency, rate_value, burst = (value.get(key) for key in _KEYS)
        if concurrency is None and rate_value is None:
            raise InvalidLimit('expected "concurrency", "rate" or both, got neither')
        if burst is not None and rate_value is None:
            raise InvalidLimit("burst: expected a rate beside it, got none")
        rate: int | None = None
        per = 1
        if rate_value is not None:
            rate, per = _parse_rate(rate_value)
        return cls(
            concurrency=None if concurrency is None else _check_whole("concurrency", concurrency),
            rate=rate,
            per=per,
            burst=None if burst is None else _check_whole("burst", burst),
        )

    @property
    def per_second(self) -> float:
        """Return the number of tokens added per second."""
        return self.rate / self.per if self.rate else 0.0

    @property
    def capacity(self) -> float:
        """Return the maximum number of tokens saved up."""
        return float(self.burst) if self.burst else max(1.0, self.per_second * SAVED_S)

    def __str__(self) -> str:
        parts = [] if self.concurrency is None else [f"{self.concurrency} at a time"]
        if self.rate is not None:
            parts.append(rate_text(self.rate, self.per) + (f", {self.burst} at once" if self.burst else ""))
        return " and ".join(parts)


def rate_text(rate: int, per: int) -> str:
    """Return the rate in a form that `Allowance.of` parses."""
    unit, seconds = next((pair for pair in (("d", 86_400), ("h", 3600), ("m", 60)) if per % pair[1] == 0), ("s", 1))
    return f"{rate}/{'' if per == seconds else per // seconds}{unit}"


def _parse_rate(value: object) -> tuple[int, int]:
    match = _RATE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if not match or match[3] not in _UNITS:
        raise InvalidLimit(
            'rate: expected a number and a time, such as "100/s", "10/m" or "5/30s", got %(value)s',
            value=quoted(value),
        )
    rate, per = int(match[1]), int(match[2] or 1) * _UNITS[match[3]]
    if not 1 <= rate <= MAX_INTEGER or not 1 <= per <= LONGEST_PER_S:
        raise InvalidLimit(
            "rate: expected 1 to %(most)s in a second to %(days)s days, got %(value)s",
            most=MAX_INTEGER,
            days=LONGEST_PER_S // 86_400,
            value=quoted(value),
        )
    return rate, per


def _check_whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_INTEGER:
        raise InvalidLimit(
            "%(name)s: expected a whole number from 1 to %(most)s, got %(value)s",
            name=name,
            most=MAX_INTEGER,
            value=quoted(value),
        )
    return value


class LimiterState(msgspec.Struct, kw_only=True):
    """A limiter: the counters of a limit, as stored in its row. Change it only while that row is locked."""

    id: int
    scope: str = Scope.TASK
    name: str = ""
    # A copy of the limit's numbers: a transaction that has locked this row knows the current ones (ADR 0016).
    allows: Allowance
    is_paused: bool = False
    in_use: int = 0
    tokens: float = 0.0
    filled_at: datetime
    opens_at: datetime | None = None
    is_awaited: bool = False
    """Whether jobs are blocked by it."""

    @property
    def has_rate(self) -> bool:
        """Return whether it limits the rate of starts."""
        return self.allows.rate is not None

    @property
    def room(self) -> int:
        """Return the number of jobs that may pass now."""
        maximums = [MAX_INTEGER if self.allows.concurrency is None else self.allows.concurrency - self.in_use]
        if self.has_rate:
            # The tolerance absorbs rounding: ten times 0.1 tokens must count as one.
            maximums.append(floor(self.tokens + _TOLERANCE))
        return 0 if self.is_paused else max(0, min(maximums))

    def fill(self, now: datetime) -> None:
        """Add the tokens since the last call.

        Tokens for blocked jobs are reserved until `opens_at`, so none are added before it.
        """
        # No job may overtake one that waits for tokens (ADR 0016).
        if not self.has_rate or (self.opens_at is not None and now < self.opens_at):
            return
        elapsed_s = max(0.0, (now - self.filled_at).total_seconds())
        # A release that is late has a larger capacity, up to FORGIVEN_S, so that the average rate is kept.
        late_s = min((now - self.opens_at).total_seconds(), FORGIVEN_S) if self.opens_at else 0.0
        capacity = max(self.allows.capacity + late_s * self.allows.per_second, self.tokens)
        self.tokens = min(self.tokens + elapsed_s * self.allows.per_second, capacity)
        # The database's clock may step back; the same time must not add tokens twice.
        self.filled_at = max(now, self.filled_at)
        self.opens_at = None

    def take(self) -> None:
        """Acquire a permit and a token for one job."""
        # Without a concurrency limit there is no permit, and the job ends like any other (ADR 0016).
        self.in_use += self.allows.concurrency is not None
        if self.has_rate:
            self.tokens -= 1

    def wait_for_tokens(self, now: datetime) -> None:
        """Set the time of the next release if tokens are missing."""
        if not self.has_rate or self.is_paused or self.opens_at is not None or floor(self.tokens + _TOLERANCE) >= 1:
            return
        # Wait for a group of tokens and not for a single one: each release is a transaction.
        missing = max(0.0, self._group_size - self.tokens)
        self.opens_at = now + timedelta(seconds=missing / self.allows.per_second)

    def wait_for_next(self, now: datetime, *, has_released: bool) -> None:
        """Set the time of the release after this one.

        If no jobs were released, wait a second.
        """
        if self.has_rate and not self.is_paused:
            self.opens_at = now + timedelta(seconds=self._group_size / self.allows.per_second if has_released else 1.0)

    @property
    def _group_size(self) -> float:
        """Tokens of one release."""
        return max(1.0, min(self.allows.per_second * RELEASE_INTERVAL_S, self.allows.capacity))

    def needs_permit(self) -> bool:
        """Return whether a passing job keeps a permit until its end."""
        return self.allows.concurrency is not None


def allocate_permits(limiters_of_jobs: Iterable[Sequence[LimiterState]], now: datetime) -> list[LimiterState | None]:
    """Acquire permits for jobs just claimed, in order; for each return None or the limiter that blocks it.

    Each job acquires a permit from all its limiters or from none. If several limiters are full, a queue's limiter is
    returned last: jobs that it blocks can stay in their queue and need not be moved to the blocked state.
    """
    blockers: list[LimiterState | None] = []
    for limiters in limiters_of_jobs:
        for limiter in limiters:
            # Tokens of other limiters are reserved for their blocked jobs until `opens_at`.
            if limiter.opens_at is None or limiter.scope == Scope.QUEUE:
                limiter.fill(now)
        closed = [limiter for limiter in limiters if limiter.room < 1]
        if not closed:
            for limiter in limiters:
                limiter.take()
        else:
            for limiter in closed:
                limiter.wait_for_tokens(now)
        # Any other limiter first: a job that a queue's limiter blocks stays in its queue.
        not_of_queue = (limiter for limiter in closed if limiter.scope != Scope.QUEUE)
        blockers.append(next(not_of_queue, closed[0] if closed else None))
    return blockers


def family_of(key: str) -> str:
    """Return the part of a key before the first colon, the name of the limit its keys share."""
    return key.partition(":")[0]


def format_permits(limiters: Iterable[LimiterState]) -> str | None:
    """Return the limiter ids of a job's permits in the stored form; None if there are none."""
    ids = [str(limiter.id) for limiter in limiters if limiter.needs_permit()]
    # A comma at both ends too: SQL searches for `,id,`, which must not match a part of a longer id.
    return f",{','.join(ids)}," if ids else None


def parse_permits(text: str | None) -> list[int]:
    """Return the limiter ids in the stored form of a job's permits."""
    return [int(number) for number in text.split(",") if number] if text else []
