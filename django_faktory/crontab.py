"""Cron entries of this project's code and settings, and how the job of an entry is made.

Stands between the rows (`store.crontab`, `store.ticks`), which know no task, and the tasks, which know no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from typing import Any

from django.conf import settings
from django.db import transaction

from . import brokers, conf, jsontext, wakeups
from .admission import parse_job
from .arguments import decoded_call, encoded_call
from .backend import new_jid
from .cron import Cron, Schedule, check_policies
from .cron_models import CronEntry
from .errors import FaktoryError, InvalidCron, UnknownJobType
from .jsonvalues import encoded, normalized
from .payloads import MAX_NAME, JobPayload, queue_name
from .redaction import told
from .store import crontab, ticks
from .store.crontab import Definition
from .store.ticks import Enqueued
from .tasks import FaktoryTask, autodiscover, lookup, registered

JOB_MEMBERS = ("retry", "reserve_for", "priority", "backtrace", "custom")
"""What an entry of another language's jobtype can say of its job, as PUSH has it."""

_KEYS = ("schedule", "zone", "task", "jobtype", "queue", "args", "kwargs", "job", "missed", "window", "overlap")


def sync(*, using: str) -> None:
    """Bring the rows up to what the code of this process says. Tasks must have been imported."""
    crontab.sync(definitions(), using=using)


def definitions() -> Iterator[Definition]:
    """Every entry of the tasks and of `FAKTORY["CRON"]`. Raises InvalidCron; its field begins with the place."""
    for place, found in read():
        if isinstance(found, InvalidCron):
            raise InvalidCron(f"{place}: {found.field}", found.problem) from found
        yield found


def read() -> Iterator[tuple[str, Definition | InvalidCron]]:
    """Where each entry is defined, and the entry, or what is wrong with it."""
    seen: dict[str, str] = {}
    for place, entry in _entries():
        try:
            found = entry()
        except InvalidCron as error:
            yield place, error
            continue
        if found.name in seen:
            problem = f'"{found.name}" is the name of {seen[found.name]} too; give one of them another'
            yield place, InvalidCron("name", problem)
            continue
        seen[found.name] = place
        yield place, found


def of_task(task: FaktoryTask[..., Any], one: Cron) -> Definition:
    """The entry of a task. Raises InvalidCron."""
    args, kwargs = _call_of(task, list(one.args), one.kwargs)
    return Definition(
        name=_checked_name(one.name or task.jobtype),
        schedule=one.schedule,
        zone=one.zone or settings.TIME_ZONE,
        jobtype=task.jobtype,
        queue=_checked_queue(one.queue),
        args=args,
        kwargs=kwargs,
        missed=str(one.missed),
        window_s=one.window,
        overlap=str(one.overlap),
    )


def of_settings(name: object, entry: object) -> Definition:
    """The entry of `FAKTORY["CRON"][name]`. Raises InvalidCron."""
    if not isinstance(entry, Mapping):
        raise InvalidCron(
            "entry", f'expected a dict such as {{"schedule": "30 2 * * *", "task": …}}, got {told(entry)}'
        )
    for key in entry:
        if key not in _KEYS:
            raise InvalidCron(str(key), f"no such key; known: {', '.join(_KEYS)}")
    if ("task" in entry) == ("jobtype" in entry):
        raise InvalidCron("task or jobtype", 'expected either "task", one of this project, or "jobtype", any worker\'s')
    schedule, zone = entry.get("schedule"), entry.get("zone") or settings.TIME_ZONE
    Schedule.of(schedule, zone)
    policies = {key: entry.get(key, default) for key, default in _POLICIES.items()}
    check_policies(*policies.values())
    jobtype = entry["task"] if "task" in entry else entry["jobtype"]
    args, kwargs, job = entry.get("args", []), entry.get("kwargs", {}), entry.get("job", {})
    return defined(
        name=_checked_name(name),
        schedule=str(schedule),
        zone=str(zone),
        jobtype=jobtype,
        queue=entry.get("queue", ""),
        args=args,
        kwargs=kwargs,
        job=job,
        policies=policies,
        must_be_task="task" in entry,
    )


def defined(
    *,
    name: str,
    schedule: str,
    zone: str,
    jobtype: Any,
    queue: Any,
    args: Any,
    kwargs: Any,
    job: Any,
    policies: Mapping[str, Any],
    must_be_task: bool = False,
    is_json: bool = False,
) -> Definition:
    """An entry whose job is a task's call where one has this name, and what a client would push otherwise.

    `must_be_task`: others are refused. `is_json`: args and kwargs are as a job carries them. Raises InvalidCron.
    """
    task = task_of(jobtype) if isinstance(jobtype, str) else None
    if must_be_task and task is None:
        raise InvalidCron("task", f"no task of this project is called {jobtype!r:.120}")
    rest = Definition(
        name=_checked_name(name),
        schedule=schedule,
        zone=zone,
        jobtype=str(jobtype),
        queue=_checked_queue(queue),
        missed=str(policies["missed"]),
        window_s=policies["window"],
        overlap=str(policies["overlap"]),
    )
    if task is not None:
        if job:
            raise InvalidCron("job", f"a task has its options where it is defined, in @task(…), got {told(job)}")
        if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
            raise InvalidCron("args", f"expected a list, and kwargs a dict, got {told(args)} and {told(kwargs)}")
        positional, named = _call_of(task, list(args), kwargs, is_json=is_json)
        return rest._replace(args=positional, kwargs=named)
    if kwargs:
        raise InvalidCron("kwargs", f"only tasks of this project take them, and {jobtype!r:.120} is none that is known")
    return _of_another_language(rest, jobtype, args, job)


def task_of(jobtype: str) -> FaktoryTask[..., Any] | None:
    """The task of this project that is called so, if there is one."""
    try:
        return lookup(jobtype)
    except UnknownJobType:
        return None


def enqueue(entry: CronEntry) -> Enqueued:
    """Make and push the job of an entry: a task's by `enqueue`, middleware and all; others as a client would push it.

    Raises whatever keeps it from that.
    """
    task = task_of(entry.jobtype)
    if task is None:
        job = _payload(entry)
        for refused in filter(None, brokers.get_broker().push([job])):
            raise refused
        return Enqueued(job.jid, job.queue)
    if entry.queue:
        task = task.using(queue_name=entry.queue)
    args, kwargs = jsontext.decode(entry.args), jsontext.decode(entry.kwargs)
    if not task.plain_json:
        args, kwargs = decoded_call(args, kwargs)
    result = task.enqueue(*args, **kwargs)
    return Enqueued(result.id, task.queue_name)


_POLICIES = {"missed": "once", "window": 86_400, "overlap": "allow"}


def run_now(entry: CronEntry, *, using: str) -> Enqueued:
    """Enqueue its job at once, whatever pause and overlap say. Raises FaktoryError where there can be none."""
    autodiscover()  # a web process need not have met its tasks
    got = ticks.run_now(entry.pk, enqueue, using=using)
    transaction.on_commit(partial(wakeups.announce, using, {got.queue}), using=using)
    return got


def _entries() -> Iterator[tuple[str, Callable[[], Definition]]]:
    """Where each entry is defined, and what reads it."""
    for task in registered():
        for one in task.cron:
            yield f"task {task.module_path}: cron", partial(of_task, task, one)
    for name, entry in conf.get("CRON").items():
        yield f"FAKTORY['CRON'][{name!r:.80}]", partial(of_settings, name, entry)


def _call_of(
    task: FaktoryTask[..., Any], args: list[Any], kwargs: Mapping[str, Any], *, is_json: bool = False
) -> tuple[str, str]:
    """The call as JSON. Raises InvalidCron where the task does not take it, or JSON cannot hold it."""
    try:
        signature(task.func).bind(*([None] if task.takes_context else []), *args, **kwargs)
        positional, named = encoded_call(args, kwargs, plain_json=task.plain_json or is_json)
        return encoded(positional), encoded(named)
    except (TypeError, ValueError, FaktoryError) as error:
        raise InvalidCron("args", f"{task.jobtype} cannot be called with them: {error}") from error


def _of_another_language(rest: Definition, jobtype: Any, args: Any, job: Any) -> Definition:
    if not isinstance(args, list | tuple):
        raise InvalidCron("args", f"expected a list, got {told(args)}")
    if not isinstance(job, Mapping):
        raise InvalidCron("job", f"expected a dict, got {told(job)}")
    for member in job:
        if member not in JOB_MEMBERS:
            raise InvalidCron(f"job.{member}", f"expected one of {', '.join(JOB_MEMBERS)}")
    if not isinstance(jobtype, str):
        raise InvalidCron("jobtype", f"expected the name that workers know it by, got {jobtype!r:.80}")
    texts = {}
    for field, value in (("args", args), ("job", job)):
        try:
            texts[field] = encoded(normalized(value))
        except (TypeError, ValueError, FaktoryError) as error:
            raise InvalidCron(field, f"JSON cannot hold it: {error}") from error
    found = rest._replace(args=texts["args"], job=texts["job"])
    try:
        _payload(CronEntry(**found._asdict()))
    except FaktoryError as error:
        raise InvalidCron("job", str(error)) from error
    return found


def _payload(entry: CronEntry) -> JobPayload:
    """The job of an entry that is no task of ours, checked as PUSH checks. Raises InvalidPayload."""
    members = {
        "jid": jsontext.encode(new_jid()),
        "jobtype": jsontext.encode(entry.jobtype),
        "queue": jsontext.encode(queue_name(entry.queue)),
        "args": entry.args,
        **jsontext.members(entry.job),
    }
    return parse_job(jsontext.join(members.items()))


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise InvalidCron("name", f"expected 1 to {MAX_NAME} printable characters, got {name!r:.80}")
    return name


def _checked_queue(name: object) -> str:
    try:
        return queue_name(name) if name else ""  # type: ignore[arg-type]  # what is no text matches no name
    except (FaktoryError, TypeError) as error:
        raise InvalidCron("queue", str(error)) from error
