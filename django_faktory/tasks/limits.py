"""Limits defined in this project's code and settings; `sync` writes them to the rows.

`pause`, `resume`, `set_limit` and `remove_limit` change them at run time. Connects tasks with the rows of limits, which
must not import tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .. import conf
from ..core.job_options import limit_key
from ..core.limits import Allowance, InvalidLimit, Scope
from ..core.payloads import queue_name
from ..errors import InvalidPayload, quoted, translatable
from ..models import Limit
from ..store.limits import definitions as limit_definitions
from ..store.limits.definitions import LimitDefinition
from .base import FaktoryTask, autodiscover, registered

__all__ = ["pause", "paused", "remove_limit", "resume", "set_limit"]

PLACES = {"queues": Scope.QUEUE, "tasks": Scope.TASK, "keys": Scope.KEY}
"""Keys of `FAKTORY["LIMITS"]` and their scopes."""


class InvalidDefinition(NamedTuple):
    """An invalid limit of the settings, and its place."""

    place: str
    problem: str
    is_place: bool = False
    """True if the place itself is invalid, such as an unknown scope; False if the limit there is."""


def pause(*tasks: FaktoryTask[..., Any] | str, by: str = "", reason: str = "") -> list[str]:
    """Stop jobs of these tasks from starting, on all workers; return the tasks that were not paused before.

    Each argument is a task, or a name, which may belong to a worker in another language. Running jobs continue, and
    jobs can be enqueued. Pages show the `reason` and `by`, by default the host and process.
    """
    return limit_definitions.pause(map(_jobtype, tasks), using=conf.get("DATABASE"), by=by, reason=reason)


def resume(*tasks: FaktoryTask[..., Any] | str) -> list[str]:
    """Let jobs of these tasks start again, within their limits; return the tasks that were paused."""
    return limit_definitions.resume(map(_jobtype, tasks), using=conf.get("DATABASE"))


def paused() -> list[str]:
    """Return the names of the paused tasks."""
    return limit_definitions.paused_tasks(using=conf.get("DATABASE"))


def set_limit(scope: str, name: str, value: object) -> Limit:
    """Create or change a limit, as an edit in the admin does: it overrides code, and takes effect at once.

    `scope` is "queue", "task" or "key". `value` is what `@task(limit=…)` takes: 5, "100/s", or a dict of both. Raises
    InvalidLimit.
    """
    if scope not in list(Scope):
        raise InvalidLimit("scope: expected %(known)s, got %(scope)s", known=", ".join(Scope), scope=quoted(scope))
    return limit_definitions.save_limit(scope, check_name(scope, name), Allowance.of(value), using=conf.get("DATABASE"))


def remove_limit(scope: str, name: str) -> bool:
    """Remove a limit and return whether it existed. A definition in code takes effect again. Raises InvalidLimit."""
    # The stored name: that of a long key is a hash.
    limit = Limit.objects.filter(scope=scope, name=check_name(scope, name)).first()
    if limit is not None:
        limit_definitions.remove(limit, using=conf.get("DATABASE"))
    return limit is not None


def revert_to_code(limit: Limit, *, using: str) -> bool:
    """Reset an edited limit: the definition in code takes effect at once. Return whether it was edited."""
    if not limit_definitions.revert_edit(limit, using=using):
        return False
    autodiscover()  # a web process may not have imported its tasks
    for definition in read_definitions():
        # Without this the limit would differ from the code until the next `sync`.
        if isinstance(definition, LimitDefinition) and (definition.scope, definition.name) == (limit.scope, limit.name):
            limit_definitions.save_limit(*definition, using=using, origin=Limit.Origin.CODE)
    return True


def _jobtype(task: FaktoryTask[..., Any] | str) -> str:
    return check_name(Scope.TASK, task if isinstance(task, str) else task.jobtype)


def sync(*, using: str) -> None:
    """Update the rows to the limits that this process's code defines. Tasks must have been imported."""
    limit_definitions.sync(definitions(), using=using)


def definitions() -> Iterator[LimitDefinition]:
    """Yield every limit of the tasks and of the settings; settings override tasks. Raises InvalidLimit."""
    # A dict removes duplicates: settings are read last, so they replace the task's definition.
    by_name: dict[tuple[str, str], LimitDefinition] = {}
    for definition in read_definitions():
        if isinstance(definition, InvalidDefinition):
            raise InvalidLimit("%(place)s: %(problem)s", place=definition.place, problem=definition.problem)
        by_name[definition.scope, definition.name] = definition
    yield from by_name.values()


def read_definitions() -> Iterator[LimitDefinition | InvalidDefinition]:
    # With limit_key the limit applies to keys; their prefix, the part before the colon, is the jobtype.
    for task in registered():
        if task.limit is not None:
            scope = Scope.TASK if task.limit_key is None else Scope.KEY
            yield LimitDefinition(scope, task.jobtype, Allowance.of(task.limit))
    settings = conf.get("LIMITS")
    if not isinstance(settings, Mapping):
        message = f'expected a dict such as {{"queues": {{"mail": 5}}}}, got {settings!r:.80}'
        yield InvalidDefinition("LIMITS", message, is_place=True)
        return
    for key, entries in settings.items():
        if key not in PLACES and key != "workers":
            known = ", ".join(map(repr, [*PLACES, "workers"]))
            yield InvalidDefinition("LIMITS", f"no such scope: {key!r:.80}; known: {known}", is_place=True)
        elif not isinstance(entries, Mapping):
            yield InvalidDefinition(f"LIMITS[{key!r}]", f"expected a dict of names and limits, got {entries!r:.80}")
        elif key == "workers":  # no rows: each worker limits its own FETCHes
            yield from filter(None, (_check_worker_limit(name, value) for name, value in entries.items()))
        else:
            yield from (_read_entry(key, name, value) for name, value in entries.items())


def _check_worker_limit(name: object, value: object) -> InvalidDefinition | None:
    place = f"LIMITS['workers'][{name!r:.80}]"
    try:
        check_name(Scope.QUEUE, name)
        allowance = Allowance.of(value)
    except InvalidLimit as error:
        return InvalidDefinition(place, str(error))
    # A worker caps its concurrent jobs by itself; a rate needs the shared rows of the database.
    if isinstance(value, int) and allowance.concurrency == value:
        return None
    return InvalidDefinition(place, f"expected a whole number of jobs at a time, got {value!r:.80}")


def _read_entry(key: str, name: object, value: object) -> LimitDefinition | InvalidDefinition:
    place = f"LIMITS[{key!r}][{name!r:.80}]"
    try:
        return LimitDefinition(PLACES[key], check_name(PLACES[key], name), Allowance.of(value))
    except InvalidLimit as error:
        return InvalidDefinition(place, str(error))


def check_name(scope: str, name: object) -> str:
    """Return the stored form of a name for a limit of this scope. Raises InvalidLimit."""
    try:
        if scope == Scope.QUEUE and isinstance(name, str) and name:
            return queue_name(name)
        return limit_key(name)
    except InvalidPayload as error:
        raise InvalidLimit("name: %(problem)s, got %(name)s", problem=error, name=quoted(name)) from None
    except ValueError:
        text = translatable("name: expected one character or more, without NUL, got %(name)s")
        raise InvalidLimit(text, name=quoted(name)) from None
