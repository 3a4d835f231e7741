"""Change a job that does not run: its arguments, queue, priority or time. Used by the admin and the API.

Only what is changed is written anew; the rest of the job's text stays as its client sent it, digit by digit.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

from django.db import transaction

from . import brokers, jsontext, wakeups
from .admission import parse_job
from .errors import InvalidPayload, UnknownJobType
from .jsonvalues import encoded
from .lifecycle import State
from .models import Job
from .payloads import JobPayload, priority_to_wire, rfc3339
from .sealing import is_sealed
from .store import editing, queues
from .tasks import autodiscover, lookup

EDITABLE = editing.EDITABLE


class Changes(NamedTuple):
    """What is to become of a job; what is None stays."""

    args: list[Any] | None = None
    """As the job carries them: in JSON's types, references and all."""
    kwargs: Mapping[str, Any] | None = None
    queue: str | None = None
    priority: int | None = None
    """Django's, -100 to 100, larger first."""
    run_at: datetime | None = None


def edit(jid: str, changes: Changes, *, using: str) -> Job:
    """Change this job; returns it as it is then.

    Raises JobNotFound; InvalidTransition where it runs or has ended, or is given a time and waits for none;
    InvalidPayload for what no job can be, or its task cannot be called with; NotUnique.
    """
    autodiscover()  # a web process need not have met its tasks
    job = editing.edit(jid, partial(_edited, changes), using=using)
    if job.state in (State.ENQUEUED, State.BLOCKED):
        transaction.on_commit(partial(_tell, job.queue, using), using=using)
    return job


def call_of(job: Job) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a stored job, as it carries them."""
    found = jsontext.members(job.payload)
    custom = jsontext.last_members(found.get("custom", "{}")) if found.get("custom", "").startswith("{") else {}
    kwargs = jsontext.decode(custom.get("kwargs", "{}"))
    return jsontext.decode(found.get("args", "[]")), kwargs if isinstance(kwargs, dict) else {}


def _edited(changes: Changes, row: Job) -> editing.Edit:
    found = jsontext.members(row.payload)
    _refuse_sealed(changes, found)
    if changes.args is not None:
        found["args"] = _json("args", changes.args)
    if changes.kwargs is not None:
        found["custom"] = _with_kwargs(found.get("custom", "{}"), _json("kwargs", changes.kwargs))
    if changes.queue is not None:
        found["queue"] = jsontext.encode(changes.queue)
    if changes.priority is not None:
        found["priority"] = str(priority_to_wire(changes.priority))
    if changes.run_at is not None and row.state == State.SCHEDULED:
        found["at"] = jsontext.encode(rfc3339(changes.run_at))
    job = _keyed(parse_job(jsontext.join(found.items())))
    if changes.args is not None or changes.kwargs is not None:
        check_call(job.jobtype, *call_of(Job(payload=job.text)))
    weight = row.weight if changes.priority is None else -changes.priority
    return editing.Edit(job, weight, changes.run_at)


def _refuse_sealed(changes: Changes, found: Mapping[str, str]) -> None:
    """Nobody edits what they cannot read; and half of an envelope is none."""
    is_changed = changes.args is not None or changes.kwargs is not None
    if is_changed and is_sealed(jsontext.decode(found.get("args", "[]"))):
        raise InvalidPayload("args: they are encrypted and cannot be edited; discard this job and enqueue another")


def _json(field: str, value: Any) -> str:
    try:
        return encoded(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidPayload(f"{field}: JSON cannot hold it: {error}") from error


def _with_kwargs(custom: str, kwargs: str) -> str:
    members = jsontext.last_members(custom) if custom.startswith("{") else {}
    return jsontext.join({**members, "kwargs": kwargs}.items())


def _keyed(job: JobPayload) -> JobPayload:
    """With the key of its queue's lock, where the project has such queues."""
    locket = getattr(brokers.get_broker(), "locket", None)
    return locket.keyed(job) if locket is not None and locket.is_enabled else job


def check_call(jobtype: str, args: list[Any], kwargs: Mapping[str, Any]) -> None:
    """Whether the task of this name takes such arguments, where it is one of this project. Raises InvalidPayload."""
    try:
        task = lookup(jobtype)
    except UnknownJobType:
        return
    try:
        signature(task.func).bind(*([None] if task.takes_context else []), *args, **kwargs)
    except TypeError as error:
        raise InvalidPayload(f"args: {jobtype} cannot be called with them: {error}") from error


def _tell(queue: str, using: str) -> None:
    queues.add({queue}, using=using)
    wakeups.announce(using, {queue})
