"""Middleware around every enqueue and every run; context travels in the `custom` of jobs.

`FAKTORY = {"MIDDLEWARE": ["django_faktory.tasks.middleware.Language", …]}`, outermost first; `docs/middleware.md`.
With an empty list nothing here is called.
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

from .. import conf
from ..errors import FaktoryError
from . import tracing
from .compat import TaskResult

__all__ = ["Call", "Language", "Middleware", "TimeZone", "Trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A job being enqueued or run: `result` has its id, task and arguments, in JSON types."""

    result: TaskResult[..., Any]
    custom: dict[str, Any] = field(default_factory=dict)
    """Data that travels with the job, in JSON types: filled before the push, read at the run."""


class Middleware:
    """Base class of middleware: code around each enqueue and each run.

    One instance per process, created without arguments and used by many threads. An error raised here becomes the error
    of the enqueue or of the attempt.
    """

    @contextmanager
    def enqueue(self, calls: Sequence[Call]) -> Iterator[None]:  # noqa: ARG002
        """Wrap one push: of one job, or of all jobs of `enqueue_many`."""
        yield

    @contextmanager
    def run(self, call: Call) -> Iterator[None]:  # noqa: ARG002
        """Wrap one run, in its thread and, for an atomic task, in its transaction."""
        yield

    @asynccontextmanager
    async def arun(self, call: Call) -> AsyncIterator[None]:
        """Wrap one run of an `async def` task, on the event loop; calls `run` unless overridden."""
        with self.run(call):
            yield


class Language(Middleware):
    """Run tasks in the language that was active at enqueue; key `locale`, as in Faktory's Ruby client."""

    @contextmanager
    def enqueue(self, calls: Sequence[Call]) -> Iterator[None]:
        """Store the active language."""
        # None while translations are deactivated.
        language = translation.get_language()
        for call in calls:
            if language:
                call.custom.setdefault("locale", language)
        yield

    @contextmanager
    def run(self, call: Call) -> Iterator[None]:
        """Activate the stored language."""
        language = call.custom.get("locale")
        with translation.override(language) if isinstance(language, str) and language else nullcontext():
            yield


class TimeZone(Middleware):
    """Run tasks in the time zone that was active at enqueue."""

    @contextmanager
    def enqueue(self, calls: Sequence[Call]) -> Iterator[None]:
        """Store the active time zone if it has a name."""
        # Fixed offsets have no key, and a worker could not restore them by name.
        name = getattr(timezone.get_current_timezone(), "key", None)
        for call in calls:
            if name:
                call.custom.setdefault("timezone", name)
        yield

    @contextmanager
    def run(self, call: Call) -> Iterator[None]:
        """Activate the stored time zone; an unknown one is ignored."""
        with timezone.override(zone) if (zone := _zone(call.custom.get("timezone"))) else nullcontext():
            yield


class Trace(Middleware):
    """Run tasks with the `tracing.request_id` and `tracing.traceparent` (W3C) of the request that enqueued them."""

    @contextmanager
    def enqueue(self, calls: Sequence[Call]) -> Iterator[None]:
        """Store the ids of the current request."""
        context = tracing.current_context()
        for call in calls:
            for name, value in context.items():
                # setdefault: values that are already set, for example by another middleware, take precedence.
                call.custom.setdefault(name, value)
        yield

    @contextmanager
    def run(self, call: Call) -> Iterator[None]:
        """Restore the stored ids, and clear those of any other request."""
        with tracing.use_context(call.custom):
            yield


def get_middleware() -> tuple[Middleware, ...]:
    """Return the instances of MIDDLEWARE, outermost first. Raises ImportError or TypeError for an invalid entry."""
    return _instantiate_all(tuple(conf.get("MIDDLEWARE")))


def enqueue(instances: Sequence[Middleware], calls: Sequence[Call], push: Callable[[], None]) -> None:
    """Push inside the `enqueue` of these middleware."""
    with ExitStack() as stack:
        for instance in instances:
            stack.enter_context(instance.enqueue(calls))
        push()
        return
    # Reached only if a context manager suppressed the error of the push.
    raise FaktoryError("a middleware suppressed the error of an enqueue: expected it to raise the error again")


def run(call: Call, function: Callable[[], Any]) -> Any:
    """Call the function inside the `run` of all middleware. Return None if a middleware suppresses an error."""
    with ExitStack() as stack:
        for instance in get_middleware():
            stack.enter_context(instance.run(call))
        return function()
    # A middleware suppressed the error: the attempt is a success without a result (docs/middleware.md).
    return None


async def arun(call: Call, function: Callable[[], Awaitable[Any]]) -> Any:
    """Await the function inside the `arun` of all middleware; see `run`."""
    async with AsyncExitStack() as stack:
        for instance in get_middleware():
            await stack.enter_async_context(instance.arun(call))
        return await function()
    return None


# Cached by paths, so that a changed setting (override_settings in tests) takes effect.
@lru_cache(maxsize=32)
def _instantiate_all(paths: tuple[str, ...]) -> tuple[Middleware, ...]:
    return tuple(instantiate(path) for path in paths)


def instantiate(path: str) -> Middleware:
    """Instantiate the middleware at this dotted path. Raises ImportError or TypeError."""
    middleware_class = import_string(path)
    if not (isinstance(middleware_class, type) and issubclass(middleware_class, Middleware)):
        raise TypeError(
            f"FAKTORY['MIDDLEWARE']: {path}: expected a subclass of django_faktory.tasks.middleware.Middleware, "
            f"got {middleware_class!r}"
        )
    return middleware_class()


def _zone(name: object) -> ZoneInfo | None:
    try:
        return ZoneInfo(name) if isinstance(name, str) and name else None
    # ValueError: ZoneInfo rejects absolute and parent paths, and `custom` is the client's.
    except (ZoneInfoNotFoundError, ValueError):
        return None
