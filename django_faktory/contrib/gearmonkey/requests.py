"""Protocol of a client, without I/O: generators yield commands and `Pause`s and receive the replies.

`client` executes them in a thread or on an event loop; connection errors are thrown into the generators.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from redis import exceptions

from ...errors import BrokerUnavailable, JobNotFound
from . import lua, protocol
from .errors import GearMonkeyError, JobCreationFailed, JobTimeout, NoWorkers
from .lua import Script

SLICE_S = 1.0
"""Seconds between two reads of a job's status while waiting, in case the end message is lost."""

RETRY_DELAY_S = 0.1

REDIS_ERRORS = (exceptions.RedisError, exceptions.RedisClusterException)
"""All base classes of redis-py's errors: RedisClusterException is not a RedisError."""

UNREACHABLE_ERRORS = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.RedisClusterException,  # no node can be reached
)
"""Errors of a server that is temporarily unreachable or changing its role."""


class Pause(NamedTuple):
    """Wait for this many seconds, then continue."""

    seconds: float


R = TypeVar("R")
Command = tuple[Any, ...] | Pause
Steps = Generator[Command, Any, R]


@dataclass(frozen=True, slots=True)
class Request:
    """Validated request to run a job."""

    fn: str
    input: bytes
    prio: str
    options: frozenset[protocol.Option]
    scheduled: int
    timeout_s: float | None
    """None: wait without limit."""


def new_request(
    fn: str,
    input: Any = b"",
    prio: str = protocol.NORMAL,
    options: Iterable[str] = (),
    limit: float | datetime | None = None,
    *,
    timeout: float | None = None,
    scheduled: float | datetime | None = None,
) -> Request:
    """Validate all arguments before anything is sent. Raises ValueError, or TypeError for an unserializable input.

    `limit` is TIMEOUT/SCHEDULED of the specification: `prio` decides which of the two it means.
    """
    prio = protocol.priority(prio)
    if limit is not None:
        if prio == protocol.SCHEDULED:
            scheduled = limit if scheduled is None else scheduled
        else:
            timeout = limit if timeout is None else timeout  # type: ignore[assignment]  # checked below
    if (scheduled is not None) != (prio == protocol.SCHEDULED):
        raise ValueError(
            f"scheduled: expected it with prio 'scheduled', and only there; got {scheduled!r} and {prio!r}"
        )
    names = {str(option) for option in options}
    unknown = names - {str(option) for option in protocol.Option}
    if unknown:
        raise ValueError(f"options: expected OPT_BLOCKING or OPT_ROLLCALL, got {', '.join(sorted(unknown))!r:.80}")
    return Request(
        fn=protocol.function_name(fn),
        input=protocol.encode(input),
        prio=prio,
        options=frozenset(map(protocol.Option, names)),
        scheduled=0 if scheduled is None else protocol.seconds("scheduled", scheduled),
        timeout_s=_check_timeout(timeout),
    )


def run(request: Request) -> Steps[int]:
    """Create a job as `Client.run` does and return its id."""
    # Before the job is created: after NoWorkers no job exists.
    if protocol.OPT_ROLLCALL in request.options:
        yield from roll_call(request.fn)
    id_ = yield from create(request)
    if protocol.OPT_BLOCKING in request.options:
        yield from wait(request.fn, id_, request.timeout_s)
    return id_


def get(fn: str, id_: int) -> Steps[protocol.Job]:
    """Read a job as `Client.get` does. Raises JobNotFound."""
    try:
        reply = yield ("HGETALL", lua.job_key(protocol.function_name(fn), id_))
    except UNREACHABLE_ERRORS as error:
        raise unavailable(error) from error
    except REDIS_ERRORS as error:
        raise GearMonkeyError(f"job {fn}:{id_} cannot be read: {error}") from error
    # redis-py returns a mapping or, without its response callback, the flat list of the protocol.
    fields = reply if isinstance(reply, Mapping) else dict(zip(reply[::2], reply[1::2], strict=True))
    if not fields:
        raise JobNotFound(f"{fn}:{id_}")
    return protocol.job_of(fn, id_, fields)


def roll_call(fn: str) -> Steps[int]:
    """Return the number of workers. Raises NoWorkers if there is none or the reply is not a number."""
    try:
        count = yield from run_script(lua.ROLL_CALL, [lua.registry_key(fn), lua.count_key(fn)])
    except UNREACHABLE_ERRORS as error:
        raise unavailable(error) from error
    except REDIS_ERRORS as error:
        raise NoWorkers(fn, str(error)) from error
    try:
        number = int(count or 0)
    except ValueError:
        raise NoWorkers(fn, f"{count!r:.80}") from None
    if number < 1:
        raise NoWorkers(fn, str(number))
    return number


def create(request: Request) -> Steps[int]:
    """Create the job atomically and return its id. Raises JobCreationFailed."""
    fn, is_scheduled = request.fn, request.prio == protocol.SCHEDULED
    keys = [lua.uid_key(fn), lua.queue_key(fn, request.prio)]
    reply = None
    try:
        # No id means that the next 10,000 ids are in use, after the counter was lost: ask for more.
        while reply is None:
            reply = yield from run_script(
                lua.CREATE, keys, fn, request.input, request.scheduled, "zset" if is_scheduled else "list"
            )
    except UNREACHABLE_ERRORS as error:
        # Not retried: the job may have been created, a second request would create another one.
        raise JobCreationFailed(f"job of {fn!r}: the server is unavailable, or its reply was lost: {error}") from error
    except REDIS_ERRORS as error:
        raise JobCreationFailed(f"job of {fn!r} was refused: {error}") from error
    return int(reply)


def wait(fn: str, id_: int, timeout_s: float | None) -> Steps[None]:
    """Wait until the job has ended. Raises JobTimeout, or JobNotFound if the job's data are gone.

    The message in the lock list is only a hint, left there for other waiting clients; the status decides.
    """
    ends_at = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    lock = lua.lock_key(fn, id_)
    was_woken = False
    while True:
        remaining_s = ends_at - time.monotonic()
        try:
            if (yield from _has_ended(fn, id_)):
                return
            # After the status: a job that ended in time is no timeout.
            if remaining_s <= 0:
                raise JobTimeout(fn, id_, timeout_s or 0)
            if was_woken:  # the message of an earlier end stays and would wake this client at once
                yield Pause(min(RETRY_DELAY_S, remaining_s))
            # Never 0: for Redis that is a wait without limit.
            slice_s = max(0.01, min(SLICE_S, remaining_s))
            was_woken = bool((yield ("BLMOVE", lock, lock, "RIGHT", "LEFT", f"{slice_s:.3f}")))
        except REDIS_ERRORS:  # unreachable, UNBLOCKED, or not a list: the status decides
            yield Pause(max(0.0, min(RETRY_DELAY_S, remaining_s)))
            if remaining_s <= 0:
                raise JobTimeout(fn, id_, timeout_s or 0) from None


def run_script(script: Script, keys: Iterable[str], *args: Any) -> Steps[Any]:
    """Run a script by its digest, or by its text if the server has lost it."""
    keys = list(keys)
    call = (len(keys), *keys, *args)
    try:
        return (yield ("EVALSHA", script.digest, *call))
    except exceptions.NoScriptError:
        return (yield ("EVAL", script.text, *call))


def unavailable(error: Exception) -> BrokerUnavailable:
    """Return the error as our BrokerUnavailable."""
    return BrokerUnavailable(f"Redis unavailable: {error}")


def _has_ended(fn: str, id_: int) -> Steps[bool]:
    try:
        status = yield ("HGET", lua.job_key(fn, id_), "status")
    except exceptions.ResponseError as error:
        if "WRONGTYPE" in str(error):
            raise GearMonkeyError(f"job {fn}:{id_} cannot be read: {error}") from error
        raise
    if status is None and not (yield ("EXISTS", lua.job_key(fn, id_))):
        raise JobNotFound(f"{fn}:{id_}")
    return protocol.status_of(status).is_final


def _check_timeout(timeout: object) -> float | None:
    """Return the seconds to wait, or None for no limit. 0 means no limit too, as in Redis."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < float("inf"):
        raise ValueError(f"timeout: expected seconds from 0 (without end), got {timeout!r:.80}")
    return float(timeout) or None
