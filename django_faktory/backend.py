"""Django Tasks backend: `enqueue` creates jobs, `get_result` reads them back.

Independent of the broker. Imports no model at module level, because backends are built while apps still load. Contract:
Django's `BaseTaskBackend`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.checks import CheckMessage, Error, register
from django.core.signals import setting_changed
from django.utils import timezone

from . import brokers, conf
from .core.payloads import DEFAULT_QUEUE, MAX_NAME, MIN_JID, JobPayload, queue_name
from .errors import FaktoryError, InvalidPayload, NotUnique, UnknownJobType
from .tasks import batch as batches
from .tasks import middleware
from .tasks.arguments import encode_call
from .tasks.base import FaktoryTask, P, R, lookup, new_task, registered
from .tasks.compat import (
    BaseTaskBackend,
    InvalidTask,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
    task_enqueued,
)
from .tasks.job_builder import JobBuilder
from .tasks.job_id import new_jid, new_jids
from .tasks.middleware import Call
from .tasks.refusals import name_of, problem_with, remedy_for
from .tasks.results import JobResult, result_of
from .tasks.signatures import call_error

if TYPE_CHECKING:
    from .models import Job


MAX_BUILDERS = 256
"""Maximum number of job builders that a backend keeps; beyond it, all are dropped."""


class FaktoryBackend(BaseTaskBackend):
    """The backend for `TASKS`. `QUEUES` lists the queues it accepts, all if it is empty; `OPTIONS` must be empty."""

    # A function instead of the class: it maps `name=` to `jobtype`, while Task.name stays as Django defines it.
    task_class = staticmethod(new_task)  # type: ignore[assignment]
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True
    stores_batches = True
    """Whether callbacks of a Batch may be tasks of this backend."""

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self._builders: dict[int, JobBuilder] = {}
        """Job builders of tasks that are known to be valid, by the id of the task object."""
        setting_changed.connect(self._forget_builders)

    def _forget_builders(self, *, setting: str, **_: Any) -> None:
        """Drop the builders when FAKTORY changes, as in tests, because builders cache settings."""
        if setting == "FAKTORY":
            self._builders.clear()

    def validate_task(self, task: Task[..., Any]) -> None:
        """Raise InvalidTask for a task that this backend cannot run."""
        problem = problem_with(task)
        if problem:
            raise InvalidTask(f"task {name_of(task)}: {problem}")
        try:
            super().validate_task(task)
        except InvalidTask as error:
            # Django's messages name neither the task nor what to do.
            remedy = remedy_for(str(error), alias=self.alias, queues=self.queues, queue=task.queue_name)
            raise InvalidTask(f"task {name_of(task)}: {error}{remedy}") from None
        if not isinstance(task, FaktoryTask):
            raise InvalidTask(
                f"task {task.module_path}: made for another backend, so workers of this package cannot run it; "
                "decorate it with django_faktory.task"
            )
        problem = _problem_with_queue(task.queue_name)
        if problem:
            raise InvalidTask(f"task {task.module_path}: queue_name: {problem}")

    def enqueue(self, task: Task[P, R], args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult[P, R]:
        """Enqueue one job.

        Raises TypeError for arguments that the task does not take, TypeError or ValueError for those that JSON cannot
        represent, before anything is written.
        """
        return self.enqueue_many(task, [(args, kwargs)])[0]

    def enqueue_many(
        self, task: Task[P, R], calls: Iterable[tuple[Sequence[Any], Mapping[str, Any]]]
    ) -> list[TaskResult[P, R]]:
        """Enqueue one job for each (args, kwargs) pair in a single push.

        All calls are validated before anything is written. Raises the broker's error for the first rejected job;
        accepted jobs stay enqueued and `task_enqueued` is sent for each. NotUnique carries the results of accepted
        jobs.
        """
        builder = self._get_builder(task)
        batch, now = batches.current_batch.get(), timezone.now()
        bid, caller_wid = (batch.bid, batch.caller_wid) if batch is not None else ("", "")
        calls = list(calls)  # a generator could be read only once
        wrapped: list[Call] = []
        results: list[TaskResult[..., Any]] = []
        for (args, kwargs), jid in zip(calls, new_jids(len(calls)), strict=True):
            try:
                call = self._new_call(builder, args, kwargs, jid=jid, now=now, bid=bid)
            except (TypeError, ValueError) as error:
                # A subclass is defined by other code, such as a lock's function; its constructor may differ.
                if len(calls) == 1 or type(error) not in (TypeError, ValueError):
                    raise
                raise type(error)(f"enqueue_many: call {len(wrapped)}: {error}") from error.__cause__
            wrapped.append(call)
            results.append(call.result)

        def push() -> None:
            self._push(builder.build_jobs(wrapped, now, caller_wid), results)

        if builder.middleware:
            middleware.enqueue(builder.middleware, wrapped, push)
        else:
            push()
        return results  # type: ignore[return-value]  # of this task

    def _get_builder(self, task: Task[..., Any]) -> JobBuilder:
        """Return the task's job builder. Raises InvalidTask."""
        # The builder refers to its task, so no other task object has the same id while the builder is kept.
        builder = self._builders.get(id(task))
        if builder is None:
            if isinstance(task, FaktoryTask):
                task = task.due(timezone.now())
            self.validate_task(task)
            assert isinstance(task, FaktoryTask)  # noqa: S101  (checked by validate_task)
            builder = JobBuilder(task)
            # Tasks made by `using` or `due` for one enqueue are never used again.
            if len(self._builders) >= MAX_BUILDERS:
                self._builders.clear()
            self._builders[id(task)] = builder
        return builder

    def _push(self, jobs: Sequence[JobPayload], results: Sequence[TaskResult[..., Any]]) -> None:
        """Push the jobs, and send `task_enqueued` for each accepted one. Raise the first refusal."""
        refusals = self._hand_over(jobs, results) if jobs else []
        # Signals first: receivers must learn of the accepted jobs even if the loop below raises.
        for result, refusal in zip(results, refusals, strict=True):
            if refusal is None:
                task_enqueued.send(type(self), task_result=result)
        for refusal in filter(None, refusals):
            if isinstance(refusal, NotUnique):
                refusal.results = [
                    None if refused else result for result, refused in zip(results, refusals, strict=True)
                ]
            raise refusal

    def _hand_over(
        self,
        jobs: Sequence[JobPayload],
        results: Sequence[TaskResult[..., Any]],  # noqa: ARG002  (testing's backends)
    ) -> Sequence[FaktoryError | None]:
        """Push the jobs to the producer. Return one answer per job: None, or the reason it was rejected."""
        return brokers.get_producer().push(jobs)

    def callback_job(self, task: Task[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> JobPayload:
        """Build the job that a batch enqueues as its callback.

        Raises the same errors as `enqueue` raises before writing; also InvalidTask for options that a callback cannot
        have.
        """
        builder, now = self._get_builder(task), timezone.now()
        for option in ("unique_for", "run_after"):
            if getattr(builder.task, option) is not None:
                raise InvalidTask(
                    f"task {builder.task.module_path}: {option}: expected none for a callback, which its batch "
                    "enqueues when it is done; let the callback enqueue another task"
                )
        # A callback is not a member: with a bid it would count in the batch that is open while it is built.
        [job] = builder.build_jobs([self._new_call(builder, args, kwargs, jid=new_jid(), now=now)], now)
        return job

    def get_result(self, result_id: str) -> TaskResult[..., Any]:
        """Read a job back as a TaskResult.

        Raises TaskResultDoesNotExist if no stored job of a known task has this id. Raises NotImplementedError with a
        broker that keeps no results.
        """
        if not brokers.get_broker().keeps_results:
            raise NotImplementedError(
                'results are read from this project\'s database only: with FAKTORY["BROKER"] = "remote" they are on '
                'the Faktory server; read them there, or use the broker "orm"'
            )
        try:
            job = _get_job(result_id)
            return result_of(job, lookup(job.jobtype), backend=self.alias)
        except (UnknownJobType, InvalidPayload) as error:
            raise TaskResultDoesNotExist(f"{result_id}: {error}") from error

    def check(self, **_: Any) -> list[CheckMessage]:
        """Check this entry of TASKS; `checks.settings` checks FAKTORY."""
        messages: list[CheckMessage] = []
        place = f"TASKS[{self.alias!r}]"
        # `key=str`: a value that is not a string is reported below and must not raise here.
        for name in sorted(self.queues, key=str):
            problem = _problem_with_queue(name)
            if problem:
                messages.append(Error(f"{place}: QUEUES: {problem}", id="django_faktory.E008"))
        if self.options:
            names = ", ".join(sorted(map(repr, self.options)))
            hint = "Settings of this package go into FAKTORY; options of a task into @task(…)."
            messages.append(Error(f"{place}: OPTIONS: expected none, got {names}", hint=hint, id="django_faktory.E009"))
        if not apps.is_installed("django_faktory") and conf.get("BROKER") == "orm":
            hint = 'INSTALLED_APPS += ["django_faktory"], then migrate.'
            messages.append(
                Error(f"{place}: its jobs have no table: the app is not installed", hint=hint, id="django_faktory.E010")
            )
        return messages

    def _new_call(
        self,
        builder: JobBuilder,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        jid: str,
        now: datetime,
        bid: str = "",
    ) -> Call:
        if problem := builder.signature.problem_with(args, kwargs):
            raise call_error(builder.task, args, kwargs, problem)
        encoded_args, encoded_kwargs = encode_call(args, kwargs, plain_json=builder.task.plain_json)
        custom = builder.build_custom(args, kwargs)
        if bid:
            custom["bid"] = bid
        result: JobResult[..., Any] = JobResult(
            task=builder.task,
            id=jid,
            status=TaskResultStatus.READY,
            enqueued_at=now,
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=encoded_args,
            kwargs=encoded_kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        return Call(result=result, custom=custom)


def is_checked_by_django() -> bool:
    """Return whether Django calls `check` of each backend."""
    # The backport does so only if it is in INSTALLED_APPS, which is optional.
    return BaseTaskBackend.__module__.startswith("django.") or apps.is_installed("django_tasks")


@register
def check_installation(**_: Any) -> list[CheckMessage]:
    """Check the backends of a project that has not installed the app: its checks are not registered then."""
    # Importing any task registers this check.
    if apps.is_installed("django_faktory") or is_checked_by_django():
        return []
    return [
        message for backend in task_backends.all() if isinstance(backend, FaktoryBackend) for message in backend.check()
    ]


def registered_queues() -> tuple[str, ...]:
    """Return the sorted names of all queues of the project: of its tasks, of its backends, and `default`."""
    # A project may have tasks of other backends, with queues that no worker of this package serves.
    backends = {backend.alias: backend for backend in task_backends.all() if isinstance(backend, FaktoryBackend)}
    task_queues = {task.queue_name for task in registered() if task.backend in backends}
    return tuple(sorted(task_queues.union({DEFAULT_QUEUE}, *(backend.queues for backend in backends.values()))))


def _problem_with_queue(name: object) -> str:
    """Return why the protocol cannot carry this queue name; "" if it can."""
    if not isinstance(name, str) or not name:
        return f"expected the name of a queue, got {name!r:.80}"
    try:
        queue_name(name)
    except InvalidPayload as error:
        return str(error)
    return ""


def _get_job(jid: object) -> Job:
    """Return the stored job with this id.

    Raises TaskResultDoesNotExist. Ids that no job can have are rejected without a query.
    """
    # Not at module level: apps are still loading then.
    from .models import Job
    from .store.transactions import run

    # PostgreSQL raises for a NUL, which is not printable.
    if isinstance(jid, str) and MIN_JID <= len(jid) <= MAX_NAME and jid.isprintable():
        alias = conf.get("DATABASE")
        row = run(alias, lambda _: Job.objects.using(alias).readable().latest_of(jid), atomic=False)
        if row is not None:
            return row
    raise TaskResultDoesNotExist(
        f"no job has the id {jid!r:.80}: it is wrong, or the job's row was deleted, result_ttl seconds after its end"
    )
