"""Limits of this project's code and settings. Stands between the rows, which know no task, and the tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from . import conf
from .errors import InvalidPayload
from .gating import Allowance, InvalidLimit, Scope
from .models import Limit
from .options import limit_key
from .payloads import queue_name
from .store import limits
from .store.limits import Definition
from .tasks import FaktoryTask, autodiscover, registered

PLACES = {"queues": Scope.QUEUE, "tasks": Scope.TASK, "keys": Scope.KEY}
"""The keys of `FAKTORY["LIMITS"]`."""


class Wrong(NamedTuple):
    """What is wrong with a limit of the settings, and where."""

    place: str
    problem: str
    is_place: bool = False
    """Whether it is the place that nobody knows, not the limit."""


def pause(*tasks: FaktoryTask[..., Any] | str) -> list[str]:
    """Let no job of these tasks start from now on, on any worker; returns those that were not paused yet.

    What runs goes on, and jobs can be enqueued. A task is named, or given itself; one of another language's worker too.
    """
    return limits.pause(map(_jobtype, tasks), using=conf.get("DATABASE"))


def resume(*tasks: FaktoryTask[..., Any] | str) -> list[str]:
    """Let jobs of these tasks start again, as their limits allow; returns those that were paused."""
    return limits.resume(map(_jobtype, tasks), using=conf.get("DATABASE"))


def paused() -> list[str]:
    """The tasks that are paused, by name."""
    return limits.paused_tasks(using=conf.get("DATABASE"))


def set_limit(scope: str, name: str, value: object) -> Limit:
    """Set a limit, or change it, as somebody does in the admin: it overrules code. Raises InvalidLimit."""
    if scope not in list(Scope):
        raise InvalidLimit(f"scope: expected {', '.join(Scope)}, got {scope!r:.80}")
    return limits.put(scope, checked_name(scope, name), Allowance.of(value), using=conf.get("DATABASE"))


def remove_limit(scope: str, name: str) -> bool:
    """Take a limit away; whether there was one. What code says comes back."""
    found = Limit.objects.using(conf.get("DATABASE")).filter(scope=scope, name=name).first()
    if found is not None:
        limits.remove(found, using=conf.get("DATABASE"))
    return found is not None


def as_in_code(limit: Limit, *, using: str) -> bool:
    """Take back what was edited of a limit: what code says holds at once; whether it was edited."""
    if not limits.take_edit_back(limit, using=using):
        return False
    autodiscover()  # a web process need not have met its tasks
    for one in read():
        if isinstance(one, Definition) and (one.scope, one.name) == (limit.scope, limit.name):
            limits.put(*one, using=using, origin=Limit.Origin.CODE)
    return True


def _jobtype(task: FaktoryTask[..., Any] | str) -> str:
    return checked_name(Scope.TASK, task if isinstance(task, str) else task.jobtype)


def sync(*, using: str) -> None:
    """Bring the rows up to what the code of this process says. Tasks must have been imported."""
    limits.sync(definitions(), using=using)


def definitions() -> Iterator[Definition]:
    """Every limit of the tasks and of the settings, which come second, and win. Raises InvalidLimit."""
    found: dict[tuple[str, str], Definition] = {}
    for one in read():
        if isinstance(one, Wrong):
            raise InvalidLimit(f"{one.place}: {one.problem}")
        found[one.scope, one.name] = one
    yield from found.values()


def read() -> Iterator[Definition | Wrong]:
    """Each limit, or what is wrong with it."""
    for task in registered():
        if task.limit is not None:
            scope = Scope.TASK if task.limit_key is None else Scope.KEY
            yield Definition(scope, task.jobtype, Allowance.of(task.limit))
    settings = conf.get("LIMITS")
    if not isinstance(settings, Mapping):
        told = f'expected a dict such as {{"queues": {{"mail": 5}}}}, got {settings!r:.80}'
        yield Wrong("LIMITS", told, is_place=True)
        return
    for place, entries in settings.items():
        if place not in PLACES and place != "workers":
            known = ", ".join(map(repr, [*PLACES, "workers"]))
            yield Wrong("LIMITS", f"no such scope: {place!r:.80}; known: {known}", is_place=True)
        elif not isinstance(entries, Mapping):
            yield Wrong(f"LIMITS[{place!r}]", f"expected a dict of names and limits, got {entries!r:.80}")
        elif place == "workers":  # no rows: a worker asks for no more
            yield from filter(None, (_of_worker(name, value) for name, value in entries.items()))
        else:
            yield from (_entry(place, name, value) for name, value in entries.items())


def _of_worker(name: object, value: object) -> Wrong | None:
    where = f"LIMITS['workers'][{name!r:.80}]"
    try:
        checked_name(Scope.QUEUE, name)
        allowed = Allowance.of(value)
    except InvalidLimit as error:
        return Wrong(where, str(error))
    if isinstance(value, int) and allowed.concurrency == value:
        return None
    return Wrong(where, f"expected a whole number of jobs at a time, got {value!r:.80}")


def _entry(place: str, name: object, value: object) -> Definition | Wrong:
    where = f"LIMITS[{place!r}][{name!r:.80}]"
    try:
        return Definition(PLACES[place], checked_name(PLACES[place], name), Allowance.of(value))
    except InvalidLimit as error:
        return Wrong(where, str(error))


def checked_name(scope: str, name: object) -> str:
    """The name that a limit of this scope may have. Raises InvalidLimit."""
    try:
        if scope == Scope.QUEUE and isinstance(name, str) and name:
            return queue_name(name)
        return limit_key(name)
    except (InvalidPayload, ValueError) as error:
        raise InvalidLimit(f"name: {error}, got {name!r:.80}") from None
