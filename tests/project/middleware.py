"""Middleware of the test project: it records, refuses or swallows enqueues and runs."""

from contextlib import asynccontextmanager, contextmanager, suppress

from django_faktory.tasks.middleware import Middleware

seen = []


class _Notes(Middleware):
    name = ""

    @contextmanager
    def enqueue(self, calls):
        seen.append(f"{self.name} enqueues {len(calls)}")
        for call in calls:
            call.custom[self.name] = call.result.task.func.__name__
        yield
        seen.append(f"{self.name} enqueued")

    @contextmanager
    def run(self, call):
        seen.append(f"{self.name} runs {call.custom.get(self.name)} {call.result.args}")
        try:
            yield
        except ValueError as error:
            seen.append(f"{self.name} sees {error}")
            raise
        seen.append(f"{self.name} ran")


class Outer(_Notes):
    name = "outer"


class Inner(_Notes):
    name = "inner"


class Async(Middleware):
    @asynccontextmanager
    async def arun(self, call):
        seen.append("async begins")
        yield
        seen.append("async ends")


class Refuses(Middleware):
    @contextmanager
    def enqueue(self, calls):
        raise PermissionError("not now")
        yield

    @contextmanager
    def run(self, call):
        raise PermissionError("not here")
        yield


class Swallows(Middleware):
    @contextmanager
    def enqueue(self, calls):
        with suppress(Exception):
            yield

    @contextmanager
    def run(self, call):
        with suppress(ValueError):
            yield


class WritesNonsense(Middleware):
    @contextmanager
    def enqueue(self, calls):
        for call in calls:
            call.custom["nonsense"] = object()
        yield


class NoMiddleware:
    pass
