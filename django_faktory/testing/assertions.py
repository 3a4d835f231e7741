"""Assertions about waiting jobs and created batches: `assert_enqueued`, `enqueued_jobs`, `made_batches`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from .. import conf
from ..core.job_parser import parse_job
from ..core.lifecycle import State
from ..core.payloads import JobPayload
from ..errors import FaktoryError
from ..models import Batch, Job
from ..tasks.arguments import encode_call
from ..tasks.base import FaktoryTask
from ..tasks.compat import Task, task_backends
from ..tasks.results import call_of
from .backends import DummyBackend, ImmediateBackend

# A blocked job waits for a lock or a limit; for its producer it is enqueued like any other (ADR 0015).
_WAITING = (State.SCHEDULED, State.ENQUEUED, State.BLOCKED, State.RETRIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueuedJob:
    """A job that waits for a worker, for its start time, or for its next attempt."""

    jid: str
    jobtype: str
    """Name of its task."""
    args: list[Any]
    """Positional arguments in JSON types."""
    kwargs: dict[str, Any]
    queue: str
    priority: int = field(repr=False)
    run_at: datetime | None
    """When it is due; None: now."""
    bid: str = field(default="", repr=False)
    """The batch that it is a member of; "" for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBatch:
    """A batch in any state."""

    bid: str
    parent_bid: str
    description: str
    complete: EnqueuedJob | None
    """The callback for when every job was executed, enqueued or not."""
    success: EnqueuedJob | None
    """The callback for when every job has succeeded, enqueued or not."""
    jobs: list[EnqueuedJob]
    """The members of the batch that are waiting."""


def enqueued_jobs(task: Task[..., Any] | None = None, queue: str | None = None) -> list[EnqueuedJob]:
    """Return waiting jobs, oldest first: all, those of a `task`, or of a `queue`. Also those of a `DummyBackend`."""
    jobtype = None if task is None else _jobtype(task)
    return [
        job
        for job in [*_jobs_in_database(), *_jobs_in_memory()]
        if (jobtype is None or job.jobtype == jobtype) and (queue is None or job.queue == queue)
    ]


def made_batches() -> list[MadeBatch]:
    """Return the created batches, oldest first, so a parent before its children."""
    # Grouped once: searching all jobs for each batch would be quadratic.
    members: dict[str, list[EnqueuedJob]] = {}
    for job in enqueued_jobs():
        members.setdefault(job.bid, []).append(job)
    return [
        MadeBatch(
            bid=row.bid,
            parent_bid=row.parent_bid,
            description=row.description,
            complete=_build_callback_job(row.complete),
            success=_build_callback_job(row.success),
            jobs=members.get(row.bid, []),
        )
        for row in (Batch.objects.order_by("pk") if _uses_database() else ())
    ]


def assert_enqueued(
    task: Task[..., Any],
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    queue: str | None = None,
    count: int | None = None,
) -> list[EnqueuedJob]:
    """Fail unless `count` jobs of this task wait, or at least one by default; return them.

    `args` and `kwargs` must equal all arguments of the enqueue, and `queue` its queue; an omitted one matches any. The
    message of the AssertionError lists the jobs that wait instead.
    """
    return _match_or_fail(enqueued_jobs(), task, args=args, kwargs=kwargs, queue=queue, count=count)


@contextmanager
def assert_enqueues(
    task: Task[..., Any],
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    queue: str | None = None,
    count: int | None = None,
) -> Iterator[list[EnqueuedJob]]:
    """Apply `assert_enqueued` to jobs enqueued inside the block; yield a list that contains them afterwards.

    For `args`, `kwargs`, `queue` and `count` see there.
    """
    # By jid, not by position: jobs that waited before may run inside the block.
    jids_before = {job.jid for job in enqueued_jobs()}
    matching: list[EnqueuedJob] = []
    yield matching
    new_jobs = [job for job in enqueued_jobs() if job.jid not in jids_before]
    # The list was yielded already, so it is extended in place.
    matching += _match_or_fail(new_jobs, task, args=args, kwargs=kwargs, queue=queue, count=count)


def _match_or_fail(
    jobs: Sequence[EnqueuedJob],
    task: Task[..., Any],
    *,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    queue: str | None,
    count: int | None,
) -> list[EnqueuedJob]:
    jobtype = _jobtype(task)
    plain_json = isinstance(task, FaktoryTask) and task.plain_json
    # Encoded like the job's own arguments: a test may pass model instances, dates and tuples.
    encoded_args, encoded_kwargs = encode_call(args or (), kwargs or {}, plain_json=plain_json)
    matching = [
        job
        for job in jobs
        if job.jobtype == jobtype
        and (args is None or job.args == encoded_args)
        and (kwargs is None or job.kwargs == encoded_kwargs)
        and (queue is None or job.queue == queue)
    ]
    if len(matching) == count or (count is None and matching):
        return matching
    expected = "at least one job" if count is None else f"{count} job{'' if count == 1 else 's'}"
    filters = {"args": args, "kwargs": kwargs, "queue": queue}
    conditions = ", ".join(f"{name}={value!r}" for name, value in filters.items() if value is not None)
    # All waiting jobs: one of them may differ in a single argument.
    waiting = "".join(f"\n  {job}" for job in jobs) or " nothing"
    raise AssertionError(
        f"expected {expected} of {jobtype}{f' with {conditions}' if conditions else ''}, got {len(matching)}; "
        f"waiting jobs:{waiting}"
    )


def _jobtype(task: Task[..., Any]) -> str:
    if isinstance(task, FaktoryTask):
        return task.jobtype
    if isinstance(task, Task):
        return task.module_path
    raise TypeError(f"expected a task, the function with @task, got {task!r:.80}")


def _jobs_in_database() -> Iterator[EnqueuedJob]:
    if not _uses_database():
        return
    for job in Job.objects.in_state(*_WAITING).order_by("pk"):
        yield _build_job(job, job.payload, run_at=job.run_at, bid=job.bid or "")


def _jobs_in_memory() -> Iterator[EnqueuedJob]:
    for backend in task_backends.all():
        # An ImmediateBackend keeps no jobs: it runs them in enqueue.
        if not isinstance(backend, DummyBackend):
            continue
        for result in backend.results:
            yield EnqueuedJob(
                jid=result.id,
                jobtype=_jobtype(result.task),
                args=result.args,
                kwargs=result.kwargs,
                queue=result.task.queue_name,
                priority=result.task.priority,
                run_at=result.task.run_after,
            )


def _uses_database() -> bool:
    """Return False if the database can have no jobs: a SimpleTestCase must not query it."""
    if all(isinstance(backend, DummyBackend | ImmediateBackend) for backend in task_backends.all()):
        return False
    if conf.get("BROKER") != "orm":
        raise FaktoryError('jobs are looked for in this project\'s database: expected FAKTORY["BROKER"] = "orm"')
    return True


def _build_callback_job(text: str) -> EnqueuedJob | None:
    return _build_job(job := parse_job(text), job.text, run_at=job.at) if text else None


def _build_job(job: Job | JobPayload, text: str, *, run_at: datetime | None, bid: str = "") -> EnqueuedJob:
    # A test compares plain values, those of tasks with encrypted arguments too.
    call = call_of(text).decrypt_arguments()
    return EnqueuedJob(
        jid=job.jid,
        jobtype=job.jobtype,
        args=call.args,
        kwargs=call.kwargs,
        queue=job.queue,
        priority=job.priority,
        run_at=run_at,
        bid=bid,
    )
