"""What wraps every enqueue and every run: a base class, and the pieces of context that jobs carry in their `custom`.

`FAKTORY = {"MIDDLEWARE": ["django_faktory.middleware.Language", …]}`, the first one outermost; `docs/middleware.md`.
Where the list is empty nothing here is called.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from django.utils import timezone, translation
from django.utils.module_loading import import_string

from . import conf, tracing
from .compat import TaskResult
from .errors import FaktoryError


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A job on its way in, or one that runs: `result` tells its id, task and arguments, as JSON has them."""

    result: TaskResult[..., Any]
    custom: dict[str, Any] = field(default_factory=dict)
    """What travels with the job: to be filled before it is pushed, to be read where it runs. JSON's types."""


class Middleware:
    """Made once a process, without arguments; used by many threads at once. An error raised here is the enqueue's,
    or that of the attempt."""

    @contextmanager
    def enqueue(self, calls: Sequence[Call]) -> Iterator[None]:  # noqa: ARG002
        """Around one push: of one job, or of all those of `enqueue_many`."""
        yield

    @contextmanager
    def run(self, call: Call) -> Iterator[None]:  # noqa: ARG002
        """Around one run, in its thread and, where the task is atomic, in its transaction."""
        yield

    @asynccontextmanager
    async def arun(self, call: Call) -> AsyncIterator[None]:
        """Around one run of an `async def` task, on the event loop: `run`, unless this is overridden."""
        with self.run(call):
            yield


class Language(Middleware):
    """Tasks run in the language that was active when they were enqueued; `locale`, as Faktory's Ruby client has it."""

    @contextmanager
    def enqueue(self, calls: Sequence[Call]) -> Iterator[None]:
        """Note the active language."""
        language = translation.get_language()
        for call in calls:
            if language:
                call.custom.setdefault("locale", language)
        yield

    @contextmanager
    def run(self, call: Call) -> Iterator[None]:
        """Activate it."""
        language = call.custom.get("locale")
        with translation.override(language) if isinstance(language, str) and language else nullcontext():
            yield


class TimeZone(Middleware):
    """Tasks run in the time zone that was active when they were enqueued."""

    @contextmanager
    def enqueue(self, calls: Sequence[Call]) -> Iterator[None]:
        """Note the active time zone, where it has a name."""
        name = getattr(timezone.get_current_timezone(), "key", None)
        for call in calls:
            if name:
                call.custom.setdefault("timezone", name)
        yield

    @contextmanager
    def run(self, call: Call) -> Iterator[None]:
        """Activate it; an unknown one is left alone."""
        with timezone.override(zone) if (zone := _zone(call.custom.get("timezone"))) else nullcontext():
            yield


class Trace(Middleware):
    """Tasks know the request they come from: `tracing.request_id` and `tracing.traceparent` (W3C) are as they were."""

    @contextmanager
    def enqueue(self, calls: Sequence[Call]) -> Iterator[None]:
        """Note what is known."""
        known = tracing.known()
        for call in calls:
            for name, value in known.items():
                call.custom.setdefault(name, value)
        yield

    @contextmanager
    def run(self, call: Call) -> Iterator[None]:
        """Know it again, and nothing of another request."""
        with tracing.known_as(call.custom):
            yield


def configured() -> tuple[Middleware, ...]:
    """MIDDLEWARE, the outermost first. Raises ImportError or TypeError for what is none."""
    return _made(tuple(conf.get("MIDDLEWARE")))


def enqueue(calls: Sequence[Call], push: Callable[[], None]) -> None:
    """Push, inside the `enqueue` of all of them."""
    with ExitStack() as stack:
        for one in configured():
            stack.enter_context(one.enqueue(calls))
        push()
        return
    raise FaktoryError("a middleware swallowed the error of an enqueue: expected it to be raised again")


def run(call: Call, function: Callable[[], Any]) -> Any:
    """Call the function inside the `run` of all of them. Where one of them swallows an error there is no result."""
    with ExitStack() as stack:
        for one in configured():
            stack.enter_context(one.run(call))
        return function()
    return None


async def arun(call: Call, function: Callable[[], Awaitable[Any]]) -> Any:
    """Await the function inside the `arun` of all of them; see `run`."""
    async with AsyncExitStack() as stack:
        for one in configured():
            await stack.enter_async_context(one.arun(call))
        return await function()
    return None


@lru_cache(maxsize=32)
def _made(paths: tuple[str, ...]) -> tuple[Middleware, ...]:
    return tuple(made(path) for path in paths)


def made(path: str) -> Middleware:
    """The middleware at this dotted path. Raises ImportError or TypeError where there is none."""
    found = import_string(path)
    if not (isinstance(found, type) and issubclass(found, Middleware)):
        raise TypeError(
            f"FAKTORY['MIDDLEWARE']: {path}: expected a subclass of django_faktory.middleware.Middleware, got {found!r}"
        )
    return found()


def _zone(name: object) -> ZoneInfo | None:
    try:
        return ZoneInfo(name) if isinstance(name, str) and name else None
    except (ZoneInfoNotFoundError, ValueError):
        return None
