"""The client of the specification, synchronous and for asyncio.

Both only execute the commands that the generators of `requests` yield.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Self, TypeVar

from redis import Redis
from redis import asyncio as async_redis

from . import requests
from .address import close, connect, connect_async, sentinels_of
from .protocol import NORMAL, Job
from .requests import REDIS_ERRORS, Pause, Steps
from .settings import url_of

R = TypeVar("R")


class Client:
    """Run jobs on GearMonkey workers. Thread-safe.

    Without `url`, the environment's GEARMONKEY_URL or the setting of this name is used. Raises UnusableServer.
    """

    def __init__(self, url: str | None = None) -> None:
        self._redis = connect(url_of(url))

    def run(
        self,
        fn: str,
        input: Any = b"",
        prio: str = NORMAL,
        options: Iterable[str] = (),
        limit: float | datetime | None = None,
        *,
        timeout: float | None = None,
        scheduled: float | datetime | None = None,
    ) -> int:
        """Create a job of this function and return its id.

        `input` is bytes, text, or a value in JSON types. `prio` is "high", "normal", "low", or "scheduled" for a job
        that waits until `scheduled`, an aware datetime or seconds since 1970. `options` may have OPT_BLOCKING, to wait
        until the job has ended, at most `timeout` seconds, and OPT_ROLLCALL. The positional `limit` is `scheduled` if
        `prio` is "scheduled", else `timeout`. Raises ValueError before anything is sent, NoWorkers with OPT_ROLLCALL,
        JobCreationFailed, JobTimeout.
        """
        request = requests.new_request(fn, input, prio, options, limit, timeout=timeout, scheduled=scheduled)
        return run_steps(self._redis, requests.run(request))

    def get(self, fn: str, id: int) -> Job:
        """Return a job as the server stores it. Raises JobNotFound."""
        return run_steps(self._redis, requests.get(fn, id))

    def close(self) -> None:
        """Close the connections; the client remains usable."""
        close(self._redis)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """Like `Client`, for asyncio; one instance belongs to one event loop. `async with` closes it."""

    def __init__(self, url: str | None = None) -> None:
        self._redis = connect_async(url_of(url))

    async def run(
        self,
        fn: str,
        input: Any = b"",
        prio: str = NORMAL,
        options: Iterable[str] = (),
        limit: float | datetime | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  (Redis waits)
        scheduled: float | datetime | None = None,
    ) -> int:
        """Create a job and return its id; like `Client.run`."""
        request = requests.new_request(fn, input, prio, options, limit, timeout=timeout, scheduled=scheduled)
        return await _arun_steps(self._redis, requests.run(request))

    async def get(self, fn: str, id: int) -> Job:
        """Return a job as the server stores it; like `Client.get`."""
        return await _arun_steps(self._redis, requests.get(fn, id))

    async def close(self) -> None:
        """Close the connections, those to Sentinels included."""
        for client in (self._redis, *sentinels_of(self._redis)):
            await client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def run_steps(redis: Redis, steps: Steps[R]) -> R:
    """Execute the commands that the steps yield, in this thread, and return the result of the steps."""
    reply: Any = None
    try:
        while True:
            command = _send(steps, reply)
            try:
                if isinstance(command, Pause):
                    time.sleep(command.seconds)
                reply = None if isinstance(command, Pause) else redis.execute_command(*command)
            except REDIS_ERRORS as error:
                reply = error
    except StopIteration as end:
        result: R = end.value
        return result


# The operations are generators, so that both clients share everything but this loop (ADR 0013).
async def _arun_steps(redis: async_redis.Redis, steps: Steps[R]) -> R:
    reply: Any = None
    try:
        while True:
            command = _send(steps, reply)
            is_pause = isinstance(command, Pause)
            try:
                reply = await (asyncio.sleep(command.seconds) if is_pause else redis.execute_command(*command))
            except REDIS_ERRORS as error:
                reply = error
    except StopIteration as end:
        result: R = end.value
        return result


def _send(steps: Steps[Any], reply: Any) -> Any:
    """Return the next command, after this reply, or error, to the one before."""
    # The generator decides whether the error is final or the command is repeated.
    return steps.throw(reply) if isinstance(reply, REDIS_ERRORS) else steps.send(reply)
