"""Change the arguments, queue, priority or time of a job that is not running. Admin, API and command line use it.

Only changed members are rewritten; the remaining text stays exactly as its client sent it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from django.db import transaction

from .. import brokers
from ..core.job_parser import parse_job
from ..core.json import jsontext
from ..core.lifecycle import State
from ..core.payloads import JobPayload, priority_to_wire, rfc3339
from ..errors import InvalidPayload, translatable
from ..models import Job
from ..store import notifier, queues
from ..store.jobs import edits
from ..tasks.base import find_registered, import_tasks
from ..tasks.encryption import is_encrypted
from ..tasks.json_values import encode_json
from ..tasks.signatures import signature_of

EDITABLE = edits.EDITABLE


class Changes(NamedTuple):
    """Changes to a job; None leaves a value as it is."""

    args: list[Any] | None = None
    """As the job carries them: JSON types, with references encoded."""
    kwargs: Mapping[str, Any] | None = None
    queue: str | None = None
    priority: int | None = None
    """Django's priority, -100 to 100, larger first."""
    run_at: datetime | None = None


def edit(jid: str, changes: Changes, *, using: str) -> Job:
    """Change the job and return its new state.

    Raises JobNotFound; InvalidTransition if it is running or has ended, or if it receives a time but is not in a state
    that waits for one; InvalidPayload if the result is not a valid job or its task does not accept the arguments;
    NotUnique if another job has the key of the new arguments.
    """
    import_tasks()  # a web process may not have imported all tasks
    job = edits.edit(jid, partial(_apply, changes), using=using)
    # Other states wait for a time, so no worker could take the job yet and a wakeup is useless.
    if job.state in (State.ENQUEUED, State.BLOCKED):
        transaction.on_commit(partial(_notify_workers, job.queue, using), using=using)
    return job


def call_of(job: Job) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a stored job as it carries them, without decoding references."""
    members = jsontext.members(job.payload)
    custom = jsontext.last_members(members.get("custom", "{}")) if members.get("custom", "").startswith("{") else {}
    kwargs = jsontext.decode(custom.get("kwargs", "{}"))
    return jsontext.decode(members.get("args", "[]")), kwargs if isinstance(kwargs, dict) else {}


def _apply(changes: Changes, row: Job) -> edits.Edit:
    members = jsontext.members(row.payload)
    _refuse_encrypted(changes, members)
    if changes.args is not None:
        members["args"] = _encode("args", changes.args)
    if changes.kwargs is not None:
        members["custom"] = _with_kwargs(members.get("custom", "{}"), _encode("kwargs", changes.kwargs))
    if changes.queue is not None:
        members["queue"] = jsontext.encode(changes.queue)
    if changes.priority is not None:
        members["priority"] = str(priority_to_wire(changes.priority))
    # Only a scheduled job has `at` in its text; for a retry the time is in the row only.
    if changes.run_at is not None and row.state == State.SCHEDULED:
        members["at"] = jsontext.encode(rfc3339(changes.run_at))
    job = _with_lock_key(parse_job(jsontext.join(members.items())))
    # Checked on the parsed result: args and kwargs may come from different sources, one new and one stored.
    if changes.args is not None or changes.kwargs is not None:
        check_call(job.jobtype, *call_of(Job(payload=job.text)))
    sort_priority = row.sort_priority if changes.priority is None else -changes.priority
    return edits.Edit(job, sort_priority, changes.run_at)


def _refuse_encrypted(changes: Changes, members: Mapping[str, str]) -> None:
    """Raise InvalidPayload if encrypted arguments would change.

    Users must not edit text that they cannot read, and args and kwargs are one encrypted envelope: replacing one of
    them would break it.
    """
    is_changed = changes.args is not None or changes.kwargs is not None
    if is_changed and is_encrypted(jsontext.decode(members.get("args", "[]"))):
        raise InvalidPayload(
            translatable("args: they are encrypted and cannot be edited; discard this job and enqueue another")
        )


def _encode(field: str, value: Any) -> str:
    try:
        return encode_json(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        text = translatable("%(field)s: JSON cannot hold it: %(problem)s")
        raise InvalidPayload(text, field=field, problem=error) from error


def _with_kwargs(custom: str, kwargs: str) -> str:
    members = jsontext.last_members(custom) if custom.startswith("{") else {}
    return jsontext.join({**members, "kwargs": kwargs}.items())


def _with_lock_key(job: JobPayload) -> JobPayload:
    """Add the key of the queue's lock, if the project has locked queues."""
    # Only the broker of this database has one: locks of a queue are part of its store (ADR 0015).
    locket = getattr(brokers.get_broker(), "locket", None)
    return locket.with_lock_key(job) if locket is not None and locket.is_enabled else job


def check_call(jobtype: str, args: list[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidPayload if the task with this name does not accept the arguments.

    Jobtypes of other projects are not checked.
    """
    task = find_registered(jobtype)
    if task is not None and (problem := signature_of(task).problem_with(args, kwargs)):
        text = translatable("args: %(task)s cannot be called with them: %(problem)s")
        raise InvalidPayload(text, task=jobtype, problem=problem)


def _notify_workers(queue: str, using: str) -> None:
    # An edit may name a queue that no job has used yet: from now on it is listed, as after a push.
    queues.add({queue}, using=using)
    notifier.announce(using, {queue})
