"""Collect the cron entries of tasks and settings, and build the job of an entry.

`definitions` and `read_definitions` collect the entries, `sync` stores them, `enqueue` and `run_now` push a job.
Connects tasks with `store.cron.entries` and `store.cron.runs`, which must not import tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from django.conf import settings
from django.db import transaction

from .. import brokers, conf
from ..core.cron import Cron, Schedule, check_policies
from ..core.job_parser import parse_job
from ..core.json import jsontext
from ..core.payloads import MAX_NAME, JobPayload, queue_name
from ..errors import FaktoryError, InvalidCron, InvalidPayload, quoted
from ..models.cron import CronEntry
from ..store import notifier
from ..store.cron import entries, runs
from ..store.cron.entries import CronDefinition
from ..store.cron.runs import CronJob
from .arguments import decode_call, encode_call
from .base import FaktoryTask, autodiscover, find_registered, registered
from .compat import InvalidTask
from .job_id import new_jid
from .json_values import encode_json, normalize
from .redaction import describe_value
from .signatures import signature_of

JOB_MEMBERS = ("retry", "reserve_for", "priority", "backtrace", "custom")
"""Job members that an entry may set if its jobtype is not a task of this project, as in PUSH."""

DEFAULTS: dict[str, Any] = {
    "queue": "", "args": [], "kwargs": {}, "job": {}, "missed": "once", "window": 86_400, "overlap": "allow",
}  # fmt: skip
"""What an entry of the settings, the admin or the API may leave out, besides its zone."""

_KEYS = ("schedule", "zone", "task", "jobtype", *DEFAULTS)


def sync(*, using: str) -> None:
    """Update the rows to the entries defined by this process. Import the tasks first."""
    entries.sync(definitions(), using=using)


def definitions() -> Iterator[CronDefinition]:
    """Yield every entry of the tasks and of `FAKTORY["CRON"]`.

    Raises InvalidCron with a field that begins with the place of the definition.
    """
    # Raises at the first error, because `sync` must not mark entries as removed when it knows only some of them.
    for place, definition in read_definitions():
        if isinstance(definition, InvalidCron):
            field = f"{place}: {definition.field}"
            raise InvalidCron(field, definition.template, **definition.values) from definition
        yield definition


def read_definitions() -> Iterator[tuple[str, CronDefinition | InvalidCron]]:
    """Yield the place of each definition with its entry, or with the InvalidCron error.

    Lets the system checks report all errors in one run.
    """
    places: dict[str, str] = {}
    for place, entry in _entries():
        try:
            definition = entry()
        except InvalidCron as error:
            yield place, error
            continue
        # Rows are keyed by name, so a second definition would overwrite the first on every start.
        if definition.name in places:
            problem = f'"{definition.name}" is the name of {places[definition.name]} too; give one of them another'
            yield place, InvalidCron("name", problem)
            continue
        places[definition.name] = place
        yield place, definition


def define_from_task(task: FaktoryTask[..., Any], cron: Cron) -> CronDefinition:
    """Return the entry of one `Cron` of a task. Raises InvalidCron."""
    args, kwargs = _encode_call(task, list(cron.args), cron.kwargs)
    return CronDefinition(
        name=_check_name(cron.name or task.jobtype),
        schedule=cron.schedule,
        zone=cron.zone or settings.TIME_ZONE,
        jobtype=task.jobtype,
        queue=_check_queue(cron.queue, task),
        args=args,
        kwargs=kwargs,
        missed=str(cron.missed),
        window_s=cron.window,
        overlap=str(cron.overlap),
    )


def define_from_settings(name: object, entry: object) -> CronDefinition:
    """Return the entry of `FAKTORY["CRON"][name]`. Raises InvalidCron."""
    if not isinstance(entry, Mapping):
        raise InvalidCron(
            "entry",
            'expected a dict such as {"schedule": "30 2 * * *", "task": …}, got %(value)s',
            value=describe_value(entry),
        )
    for key in entry:
        if key not in _KEYS:
            raise InvalidCron(str(key), "no such key; known: %(known)s", known=", ".join(_KEYS))
    if ("task" in entry) == ("jobtype" in entry):
        raise InvalidCron("task or jobtype", 'expected either "task", one of this project, or "jobtype", any worker\'s')
    members = {**entry, "name": name, "zone": entry.get("zone") or settings.TIME_ZONE}
    if "task" in entry:
        members["jobtype"] = entry["task"]
    return build_definition(members, must_be_task="task" in entry)


def build_definition(
    members: Mapping[str, Any], *, must_be_task: bool = False, is_json: bool = False
) -> CronDefinition:
    """Return the validated entry with these members, named as in the settings; `jobtype` may name a task.

    Its job is a task's call if a task has this name; other jobtypes get the job that a client would push.
    `must_be_task`: reject other jobtypes. `is_json`: args and kwargs are already encoded as in a job. Raises
    InvalidCron.
    """
    members = {"zone": settings.TIME_ZONE, **DEFAULTS, **members}
    schedule, zone, jobtype = members.get("schedule"), members["zone"], members["jobtype"]
    args, kwargs, job = members["args"], members["kwargs"], members["job"]
    Schedule.of(schedule, zone)
    check_policies(members["missed"], members["window"], members["overlap"])
    task = find_registered(jobtype) if isinstance(jobtype, str) else None
    if must_be_task and task is None:
        raise InvalidCron("task", "no task of this project is called %(name)s", name=quoted(jobtype))
    definition = CronDefinition(
        name=_check_name(members["name"]),
        schedule=str(schedule),
        zone=str(zone),
        jobtype=str(jobtype),
        queue=_check_queue(members["queue"], task),
        missed=str(members["missed"]),
        window_s=members["window"],
        overlap=str(members["overlap"]),
    )
    if task is not None:
        return _build_task_definition(definition, task, args, kwargs, job, is_json=is_json)
    if kwargs:
        raise InvalidCron(
            "kwargs",
            "only tasks of this project take them, and %(name)s is none that is known",
            name=quoted(jobtype),
        )
    return _build_foreign_definition(definition, jobtype, args, job)


def members_of(entry: CronEntry) -> dict[str, Any]:
    """Return the members that `build_definition` would build this entry from. Raises InvalidCron."""
    members: dict[str, Any] = {field: getattr(entry, field) for field in CronDefinition._fields}
    members["window"] = members.pop("window_s")
    return members | {field: decode_member(field, members[field]) for field in ("args", "kwargs", "job")}


def decode_member(field: str, text: str) -> Any:
    """Return the value of a field that is stored or submitted as JSON. Raises InvalidCron."""
    try:
        return jsontext.decode(text)
    except InvalidPayload as error:
        raise InvalidCron(field, error.template, **error.values) from error


def enqueue(entry: CronEntry) -> CronJob:
    """Build and push the job of an entry.

    A task is enqueued with `enqueue` and its middleware; other jobtypes are pushed as by a client. Propagates every
    error that prevents this.
    """
    task = find_registered(entry.jobtype)
    if task is None:
        job = _build_job(entry)
        for refusal in filter(None, brokers.get_broker().push([job])):
            raise refusal
        return CronJob(job.jid, job.queue)
    if entry.queue:
        task = task.using(queue_name=entry.queue)
    args, kwargs = jsontext.decode(entry.args), jsontext.decode(entry.kwargs)
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise _shape_error(args, kwargs)  # the row was not written by `save`
    # Decode the references, because `enqueue` would wrap them as plain dicts.
    if not task.plain_json:
        args, kwargs = decode_call(args, kwargs)
    # By its own `enqueue`, so that options, middleware and signals apply as to any other job (ADR 0014).
    result = task.enqueue(*args, **kwargs)
    return CronJob(result.id, task.queue_name)


def run_now(entry: CronEntry, *, using: str) -> CronJob:
    """Enqueue the entry's job at once, ignoring its pause and overlap policy.

    Raises FaktoryError if the job cannot be created.
    """
    autodiscover()  # a web process may not have imported all tasks
    job = runs.run_now(entry.pk, enqueue, using=using)
    # After the commit: a worker that wakes up earlier would not see the job.
    transaction.on_commit(partial(notifier.announce, using, {job.queue}), using=using)
    return job


def _entries() -> Iterator[tuple[str, Callable[[], CronDefinition]]]:
    """Yield the place of each definition and a function that parses it."""
    for task in registered():
        for cron in task.cron:
            yield f"task {task.module_path}: cron", partial(define_from_task, task, cron)
    for name, entry in conf.get("CRON").items():
        yield f"FAKTORY['CRON'][{name!r:.80}]", partial(define_from_settings, name, entry)


def _encode_call(
    task: FaktoryTask[..., Any], args: list[Any], kwargs: Mapping[str, Any], *, is_json: bool = False
) -> tuple[str, str]:
    """Return the call as JSON.

    Raises InvalidCron if the task does not accept it, or JSON cannot represent it.
    """
    problem: object = signature_of(task).problem_with(args, kwargs)
    if not problem:
        try:
            # Arguments that are JSON already, as in the admin, may contain references: encoding would wrap them.
            positional, named = encode_call(args, kwargs, plain_json=task.plain_json or is_json)
            return encode_json(positional), encode_json(named)
        except (TypeError, ValueError, FaktoryError) as error:
            problem = error
    raise InvalidCron("args", "%(task)s cannot be called with them: %(problem)s", task=task.jobtype, problem=problem)


def _build_task_definition(
    definition: CronDefinition, task: FaktoryTask[..., Any], args: Any, kwargs: Any, job: Any, *, is_json: bool
) -> CronDefinition:
    # Reject options here, because a task's job would ignore them silently.
    if job:
        raise InvalidCron(
            "job",
            "a task has its options where it is defined, in @task(…), got %(value)s",
            value=describe_value(job),
        )
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        raise _shape_error(args, kwargs)
    positional, named = _encode_call(task, list(args), kwargs, is_json=is_json)
    return definition._replace(args=positional, kwargs=named)


def _shape_error(args: object, kwargs: object) -> InvalidCron:
    text = "expected a list, and kwargs a dict, got %(args)s and %(kwargs)s"
    return InvalidCron("args", text, args=describe_value(args), kwargs=describe_value(kwargs))


def _build_foreign_definition(definition: CronDefinition, jobtype: Any, args: Any, job: Any) -> CronDefinition:
    if not isinstance(args, list | tuple):
        raise InvalidCron("args", "expected a list, got %(value)s", value=describe_value(args))
    if not isinstance(job, Mapping):
        raise InvalidCron("job", "expected a dict, got %(value)s", value=describe_value(job))
    for member in job:
        if member not in JOB_MEMBERS:
            field = f"job.{member}"
            raise InvalidCron(field, "expected one of %(known)s", known=", ".join(JOB_MEMBERS))
    if not isinstance(jobtype, str):
        raise InvalidCron("jobtype", "expected the name that workers know it by, got %(value)s", value=quoted(jobtype))
    texts = {}
    for field, value in (("args", args), ("job", job)):
        try:
            texts[field] = encode_json(normalize(value))
        except (TypeError, ValueError, FaktoryError) as error:
            raise InvalidCron(field, "JSON cannot hold it: %(problem)s", problem=error) from error
    checked = definition._replace(args=texts["args"], job=texts["job"])
    # Build the job once to validate it; the result is discarded.
    try:
        _build_job(CronEntry(**checked._asdict()))
    except FaktoryError as error:
        raise InvalidCron("job", "%(problem)s", problem=error) from error
    return checked


def _build_job(entry: CronEntry) -> JobPayload:
    """Build the job of an entry for a jobtype that is not ours, validated as in PUSH. Raises InvalidPayload."""
    members = {
        # A new jid for each tick: a push of a jid that is still stored changes nothing (W10).
        "jid": jsontext.encode(new_jid()),
        "jobtype": jsontext.encode(entry.jobtype),
        "queue": jsontext.encode(queue_name(entry.queue)),
        "args": entry.args,
        # Last, but it cannot replace the members above: `JOB_MEMBERS` has none of them.
        **jsontext.members(entry.job),
    }
    return parse_job(jsontext.join(members.items()))


def _check_name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise InvalidCron(
            "name", "expected 1 to %(most)s printable characters, got %(value)s", most=MAX_NAME, value=quoted(name)
        )
    return name


def _check_queue(name: object, task: FaktoryTask[..., Any] | None) -> str:
    # "" is kept: it means the queue of the task, which may change, or `default` for other jobtypes.
    if not name:
        return ""
    try:
        checked = queue_name(name)  # type: ignore[arg-type]  # only str matches
        if task is not None:
            task.using(queue_name=checked)  # raises for a queue that QUEUES does not list
        return checked
    except (FaktoryError, TypeError, InvalidTask) as error:
        raise InvalidCron("queue", "%(problem)s", problem=error) from error
