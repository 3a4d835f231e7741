"""The text's client, for threads and for event loops: both only carry out what `core` asks for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar

from redis import Redis
from redis import asyncio as async_redis

from . import core
from .address import close, connect, connect_async, sentinels_of
from .core import REDIS_ERRORS, Pause, Steps
from .settings import url_of
from .wire import NORMAL, Job

R = TypeVar("R")


class Client:
    """Runs jobs by GearMonkey workers. Safe to share by threads."""

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
        """Make a job; returns its id, with OPT_BLOCKING once it has ended, well or badly.

        `limit` is `scheduled` where `prio` is "scheduled", else `timeout` in seconds. Raises ValueError before
        anything is sent, NoWorkers with OPT_ROLLCALL, JobCreationFailed, JobTimeout.
        """
        asked = core.request(fn, input, prio, options, limit, timeout=timeout, scheduled=scheduled)
        return carry_out(self._redis, core.run(asked))

    def get(self, fn: str, id: int) -> Job:
        """What the server knows of a job. Raises JobNotFound."""
        return carry_out(self._redis, core.get(fn, id))

    def close(self) -> None:
        """Let go of the connections; the client stays usable."""
        close(self._redis)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """The same on an event loop; one client belongs to one loop. `async with` closes it."""

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
        """See Client.run."""
        asked = core.request(fn, input, prio, options, limit, timeout=timeout, scheduled=scheduled)
        return await _acarry_out(self._redis, core.run(asked))

    async def get(self, fn: str, id: int) -> Job:
        """See Client.get."""
        return await _acarry_out(self._redis, core.get(fn, id))

    async def close(self) -> None:
        """Let go of the connections."""
        for one in (self._redis, *sentinels_of(self._redis)):
            await one.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()


def carry_out(redis: Redis, steps: Steps[R]) -> R:
    """Do what the steps ask for, in this thread."""
    ask = next(steps)
    while True:
        try:
            try:
                if isinstance(ask, Pause):
                    time.sleep(ask.seconds)
                    reply = None
                else:
                    reply = redis.execute_command(*ask)
            except REDIS_ERRORS as error:
                ask = steps.throw(error)
            else:
                ask = steps.send(reply)
        except StopIteration as end:
            result: R = end.value
            return result


async def _acarry_out(redis: async_redis.Redis, steps: Steps[R]) -> R:
    ask = next(steps)
    while True:
        try:
            try:
                if isinstance(ask, Pause):
                    await asyncio.sleep(ask.seconds)
                    reply = None
                else:
                    reply = await redis.execute_command(*ask)
            except REDIS_ERRORS as error:
                ask = steps.throw(error)
            else:
                ask = steps.send(reply)
        except StopIteration as end:
            result: R = end.value
            return result
