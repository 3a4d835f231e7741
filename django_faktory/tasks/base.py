"""The `@task` decorator, its options, and the registry of tasks by jobtype.

`FaktoryTask` is Django's Task with the options of a job. This module imports no model; `backend` enqueues jobs and
`worker.execution` runs them. Contract: Django's Tasks framework; `docs/tasks.md`. A job never causes an import: its
jobtype is looked up in the registry or rejected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from inspect import iscoroutinefunction
from types import GenericAlias
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Literal,
    NoReturn,
    ParamSpec,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from asgiref.sync import sync_to_async
from django.apps import apps
from django.core.exceptions import SynchronousOnlyOperation
from django.utils import timezone
from django.utils.module_loading import autodiscover_modules, module_has_submodule

from ..core.cron import Cron, parse_crons
from ..core.job_control import Control
from ..core.payloads import DEFAULT_QUEUE
from ..errors import InvalidCron, InvalidStep, UnknownJobType
from .batch import Callback, RunningBatch
from .compat import (
    DEFAULT_TASK_BACKEND_ALIAS,
    GenericContext,
    GenericTask,
    InvalidTask,
    Task,
    TaskResult,
)
from .coroutines import coroutine_error
from .options import OPTIONS, classes_of, options_at_run, suggest_method, suggest_option
from .redaction import describe_value
from .rows import Rows
from .steps import Step, Steps
from .waits import JobPause

if TYPE_CHECKING:
    from django.db.models import Model

    from .results import JobResult

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Backoff = Callable[[BaseException, "TaskResult[..., Any]"], "float | None"]
Exceptions = type[BaseException] | Iterable[type[BaseException]]


class TaskOptions(TypedDict, total=False):
    """Keyword arguments of `@task(…)`, apart from `takes_context`; `make docs` writes their texts into a page."""

    name: str
    """Jobtype: the name of the task for workers and for clients in other languages. "": its dotted path."""
    queue_name: str
    """Queue of its jobs: 1 to 255 of `A-Z a-z 0-9 . _ -`."""
    priority: int
    """-100 to 100: within a queue, jobs with a higher priority run first. Other languages see 1 to 9, where 5 is 0."""
    backend: str
    """Alias in `TASKS` of the backend for its jobs."""
    max_attempts: int
    """Maximum number of attempts, the first included (docs/howto/retries.md). None: the setting `MAX_ATTEMPTS`."""
    backoff: Backoff
    """Function that returns the seconds until the next attempt, or `None` for the protocol's backoff."""
    retry_on: Exceptions
    """Failures of any other class are final: the job is dead at once. None: every failure is retried."""
    discard_on: Exceptions
    """Failures of these classes drop the job without a retry. Checked before `retry_on`."""
    timeout: float
    """Seconds that a run may take; then it fails, and is stopped as far as possible (docs/tasks.md)."""
    reserve_for: int
    """Seconds, 60 to a day, for which an FWP client, or a worker of another Faktory server, may keep the job; then it
    counts as failed. Workers of this project extend it with each BEAT (docs/workers.md). None: the setting
    `RESERVE_FOR`, or longer if `timeout` is.
    """
    result_ttl: int
    """Seconds for which its result can be read. None: the setting `RESULT_TTL`."""
    backtrace: int
    """Number of traceback lines to keep; 0: the protocol's 30, -1: none."""
    atomic: bool
    """Whether its writes to the jobs' database and the end of its job are one transaction (docs/tasks.md)."""
    unique_for: float
    """Seconds for which its queue accepts no second job with the same arguments (docs/job-options.md)."""
    unique_until: Literal["success", "start"]
    """Event that ends the uniqueness earlier: "success" of the job, or its "start"."""
    expires_in: float
    """Seconds, from enqueue or its `run_after`, after which a job that waits is dropped (docs/job-options.md)."""
    lock: str | Literal[True] | Callable[..., str | Literal[True] | None]
    """Key: jobs with the same key run one at a time. True: one key for each set of arguments (docs/locks.md)."""
    limit: int | str | Mapping[str, Any]
    """How many jobs run at a time, and how many start in a period, on all workers together (docs/limits.md)."""
    limit_key: str | Callable[..., str | None]
    """Key that is limited instead of the task."""
    track: bool
    """Whether clients in any language can query its state, until half an hour after its end (docs/job-options.md)."""
    missing: Literal["fail", "discard"]
    """Outcome of a job if a model instance among its arguments no longer exists (docs/arguments.md)."""
    plain_json: bool
    """Whether its arguments have JSON types only, and nothing in them is read as a reference (docs/arguments.md)."""
    encrypt: bool
    """Whether arguments and results are encrypted (docs/private-arguments.md). None: as `ENCRYPT_ARGUMENTS` says."""
    cron: str | Cron | Sequence[Cron]
    """When it is enqueued automatically: a cron expression, a `Cron`, or several (docs/cron.md)."""
    gearmonkey: str
    """GearMonkey function that it serves (docs/gearmonkey.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext(GenericContext[..., Any]):  # type: ignore[misc]  # frozen in Django, not in its stubs
    """First argument of a task with `takes_context=True`: the job that runs, and control of it."""

    control: Control = field(default_factory=Control, repr=False, compare=False)

    @property
    def batch(self) -> RunningBatch | None:
        """The batch that this job is a member of, or None: `with context.batch:` adds jobs to it."""
        return RunningBatch(self.control.bid, self.control.wid) if self.control.bid else None

    @property
    def cancelled(self) -> bool:
        """True once the job has been cancelled (updated every few seconds).

        A task that returns after seeing True is recorded as discarded.
        """
        return self.control.check_cancelled()

    @property
    def lock_token(self) -> int | None:
        """Fencing token of the lock this job has: later holders of the key have higher tokens. None: it has no lock."""
        return self.control.lock_token

    @property
    def lock_lost(self) -> bool:
        """True if the lock expired before it was extended: another job of its key may be running now."""
        return self.control.lock_lost

    def progress(self, done: float, total: float, note: str = "") -> None:
        """Report that `done` of `total` units are done, 0 to `total`, with a `note` for people. Raises ValueError.

        Cheap: about one call per second is written, by another thread, and the last one.
        """
        self.control.progress(done, total, note)

    def step(self, name: str, *, key: object = None) -> Step:
        """Return a context manager that commits what its block writes, once, with `step.result`.

        A later run of the job skips the block and has the result again. Steps of a loop need a `key` each. Raises
        InvalidStep.
        """
        return Step(self._steps, name, key)

    async def astep(self, name: str, function: Callable[P, R], *args: Any, key: object = None, **kwargs: Any) -> R:
        """Run a plain function as a step of an async task, in a thread, and return its result; see `step`."""
        if iscoroutinefunction(function):
            raise InvalidStep(
                f"step {name!r}: expected a plain function, got a coroutine: no transaction spans an await"
            )
        result: R = await self._steps.call(Step(self._steps, name, key), lambda: function(*args, **kwargs))
        return result

    def each(
        self,
        rows: Iterable[T],
        *,
        by: int = 500,
        name: str = "each",
        key: Callable[[T], int | str] | None = None,
        total: int | None = None,
    ) -> Rows[T]:
        """Return a context manager with an iterator over these rows, which commits what is done in chunks.

        `rows`: a queryset, ordered by a unique field, the primary key by default; or an iterable with a `key`, a
        function that returns a whole number or text of each item, in ascending order. `by`: rows of a chunk. `name`:
        differs from that of other steps of the task. `total`: number of rows, for the progress, if a COUNT is too slow.
        Raises InvalidStep.
        """
        return Rows(self._steps, rows, name=name, by=by, key=key, total=total)

    def sleep(self, *, name: str = "sleep", key: object = None, **duration: float) -> None:
        """End this run, and continue after this time, in the units of `timedelta`: `context.sleep(hours=3)`.

        A later run of the job passes it once the time is over. `name` and `key` tell several sleeps of a task apart.
        The run ends by an exception that `except Exception` does not catch. Raises InvalidStep.
        """
        JobPause(self._steps, "sleep", name, key, timedelta(**duration)).sleep()

    async def asleep(self, *, name: str = "sleep", key: object = None, **duration: float) -> None:
        """Sleep in an async task; see `sleep`."""
        await sync_to_async(JobPause(self._steps, "sleep", name, key, timedelta(**duration)).sleep)()

    def wait_for(self, name: str, *, timeout: timedelta | float | None = None, key: object = None) -> Any:
        """Return the payload of the signal with this name, the oldest one; without one end this run as `sleep` does.

        `timeout`, in seconds or as a timedelta, counts from the first run that waits. Several waits for one name need a
        `key` each. Raises WaitTimedOut, InvalidStep.
        """
        return JobPause(self._steps, "wait", name, key, timeout).wait()

    async def await_for(self, name: str, *, timeout: timedelta | float | None = None, key: object = None) -> Any:  # noqa: ASYNC109  (as in `wait_for`)
        """Wait for a signal in an async task; see `wait_for`."""
        return await sync_to_async(JobPause(self._steps, "wait", name, key, timeout).wait)()

    @property
    def _steps(self) -> Steps:
        if self.control.steps is None:
            raise InvalidStep("steps are those of a job: run the task by a worker or in a test by drain()")
        steps: Steps = self.control.steps
        return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class FaktoryTask(GenericTask[P, R]):
    """A task: what `@task` makes of a function."""

    # Django 6.0 gives its own fields no defaults.
    priority: int = 0
    backend: str = DEFAULT_TASK_BACKEND_ALIAS
    queue_name: str = DEFAULT_QUEUE
    run_after: datetime | None = None

    # `TaskOptions` describes the options.
    jobtype: str = ""
    max_attempts: int | None = None
    backoff: Backoff | None = None
    retry_on: tuple[type[BaseException], ...] | None = None
    discard_on: tuple[type[BaseException], ...] = ()
    reserve_for: int | None = None
    result_ttl: int | None = None
    backtrace: int = 0
    atomic: bool = False
    unique_for: float | None = None
    unique_until: str = "success"
    expires_in: float | None = None
    lock: str | bool | Callable[..., str | bool | None] | None = None
    limit: int | str | Mapping[str, Any] | None = None
    limit_key: str | Callable[..., str | None] | None = None
    track: bool = False
    plain_json: bool = False
    encrypt: bool | None = None
    missing: str = "fail"
    timeout: float | None = None
    cron: tuple[Cron, ...] = ()
    gearmonkey: str = ""
    about: str = ""
    """Object that its jobs are about, as `app.model/pk`; set by `using(about=…)`."""
    own_timeout: float | None = None
    """Timeout of single jobs, sent with them; set by `using(timeout=…)`. Workers read that of the task in their code.
    """
    starts_in: timedelta | None = None
    """Delay that is counted from each enqueue; set by `using(run_after=timedelta)`."""

    if TYPE_CHECKING:
        # Django's method, with the class that this backend returns.
        async def aget_result(self, result_id: str) -> JobResult[P, R]:
            """Return the result of a job of this task."""

    # Hidden from type checkers: they would accept any attribute because of `__getattr__`.
    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(GenericAlias)

        def __getattr__(self, name: str) -> Any:
            """Raise an AttributeError that names the attribute's equivalent here, for users of other libraries."""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{suggest_method(name)}")

        # Django's templates call what can be called.
        do_not_call_in_templates: ClassVar[bool] = True

        def __call__(self, *_: Any, **__: Any) -> NoReturn:
            """Raise a TypeError that says what to write."""
            raise TypeError(
                f"{self.jobtype}: a task cannot be called itself: write {self.name}.enqueue(…) for a job, or "
                f"{self.name}.call(…) to run its function here"
            )

    def __post_init__(self) -> None:
        # Zero-argument super() would fail: slots=True creates a second class, while __class__ still refers to the
        # first.
        Task.__post_init__(self)
        # The dataclass is frozen, so normalized values are set with object.__setattr__.
        for name in ("retry_on", "discard_on"):
            object.__setattr__(self, name, classes_of(getattr(self, name)))
        try:
            object.__setattr__(self, "cron", parse_crons(self.cron))
        except InvalidCron as error:
            raise InvalidTask(f"task {self.module_path}: cron: {error}") from None
        # The jobtype is set before the rules are applied, so that its own rule checks the default too.
        object.__setattr__(self, "jobtype", self.jobtype or self.module_path)
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if not option.is_valid(value):
                written = name.removeprefix("own_")  # as in `using`
                raise InvalidTask(f"task {self.module_path}: {written}: expected {option.expected}, got {value!r:.80}")
        if self.limit is not None and self.limit_key is not None and ":" in self.jobtype:
            raise InvalidTask(
                f"task {self.module_path}: limit_key: expected a task name without a colon, because keys have the form "
                f"NAME:KEY, got {self.jobtype!r:.80}; give it another name="
            )
        if self.atomic and iscoroutinefunction(self.func):
            raise InvalidTask(
                f"task {self.module_path}: atomic=True: expected a plain function, got a coroutine: Django's "
                "transactions do not span awaits; write it as `def`"
            )
        # The broker would reclaim the job before the timeout, and another worker would run it a second time.
        timeout = self.own_timeout or self.timeout
        if timeout is not None and self.reserve_for is not None and self.reserve_for <= timeout:
            raise InvalidTask(
                f"task {self.module_path}: timeout: expected less than reserve_for ({self.reserve_for} s), got "
                f"{timeout:g}; without reserve_for, the reservation follows the timeout"
            )
        _register(self)

    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: datetime | timedelta | None = None,
        backend: str | None = None,
        about: Model | str | None = None,
        max_attempts: int | None = None,
        unique_for: float | None = None,
        expires_in: float | None = None,
        timeout: float | None = None,
    ) -> FaktoryTask[P, R]:
        """Return a copy with other options, for single jobs; None keeps the value of this task.

        `run_after` is an aware datetime, or a timedelta that counts from each enqueue. `about` is the saved object that
        jobs are found by, or its name `app.model/pk`. The others are options of `@task`. Raises TypeError for a
        `run_after` of another type, InvalidTask for an option out of its range.
        """
        options: dict[str, Any] = {
            "priority": priority,
            "queue_name": queue_name,
            "backend": backend,
            "max_attempts": max_attempts,
            "unique_for": unique_for,
            "expires_in": expires_in,
            "own_timeout": timeout,
        }
        changes = {key: value for key, value in options.items() if value is not None}
        if about is not None:
            # The package of models can only be imported once apps are ready; settings import this module before.
            from ..models.related_object import about_of

            changes["about"] = about_of(about)
        # `starts_in` and `run_after` exclude each other, so the copy resets the one that is not given.
        if isinstance(run_after, timedelta):
            changes |= {"run_after": None, "starts_in": run_after}
        elif isinstance(run_after, datetime):
            changes |= {"run_after": run_after, "starts_in": None}
        elif run_after is not None:
            raise TypeError(f"run_after: expected a timedelta or an aware datetime, got {run_after!r:.80}")
        return replace(self, **changes)

    def due(self, now: datetime) -> FaktoryTask[P, R]:
        """Return this task with its delay, if it has one, turned into a time counted from `now`."""
        if self.starts_in is None:
            return self
        changes: dict[str, Any] = {"run_after": now + self.starts_in, "starts_in": None}
        return replace(self, **changes)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobResult[P, R]:
        """Enqueue a job that calls the function with these arguments; return its result, which is not there yet.

        Inside a transaction the job is stored if the transaction commits. Nothing is stored if this raises: TypeError
        for arguments that the function does not take, TypeError or ValueError for those that JSON cannot represent,
        InvalidTask for a queue that the backend does not have, NotUnique for a task with `unique_for` if another such
        job exists, BrokerUnavailable if the database or the server cannot be reached.
        """
        task = self.due(timezone.now())
        backend: Any = task.get_backend()
        try:
            result: JobResult[P, R] = backend.enqueue(task, list(args), kwargs)
        except SynchronousOnlyOperation:
            raise self._coroutine_error("enqueue", "await {}.aenqueue(…)") from None
        return result

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobResult[P, R]:
        """Enqueue a job from async code; see `enqueue`."""
        task = self.due(timezone.now())
        backend: Any = task.get_backend()
        result: JobResult[P, R] = await backend.aenqueue(task, list(args), kwargs)
        return result

    def get_result(self, result_id: str) -> JobResult[P, R]:
        """Read the job with this id. Raises TaskResultDoesNotExist; TaskResultMismatch if it is of another task."""
        try:
            result: JobResult[P, R] = Task.get_result(self, result_id)  # type: ignore[assignment]
        except SynchronousOnlyOperation:
            raise self._coroutine_error("get_result", "await {}.aget_result(…)") from None
        return result

    def callback(self, *args: P.args, **kwargs: P.kwargs) -> Callback:
        """Return this task with these arguments, for `Batch`; nothing is enqueued or checked yet."""
        return Callback(self, args, kwargs)

    def enqueue_many(self, calls: Iterable[tuple[Any, ...] | Mapping[str, Any]]) -> list[JobResult[P, R]]:
        """Enqueue a job for each call in one operation; return their results, in this order.

        A call is a tuple of positional arguments, or a dict of keyword arguments. All calls are checked before anything
        is written, and raise what `enqueue` raises. NotUnique is raised after the jobs that were accepted are stored;
        its `results` has an entry for each call, None for rejected ones.
        """
        task = self.due(timezone.now())
        # All calls are parsed first: a bad one must not leave the ones before it enqueued.
        arguments = [_parse_call(position, call) for position, call in enumerate(calls)]
        backend: Any = task.get_backend()
        # Backends of other libraries implement Django's interface only.
        enqueue_many = getattr(backend, "enqueue_many", None)
        if enqueue_many is None:
            return [backend.enqueue(task, args, kwargs) for args, kwargs in arguments]
        try:
            results: list[JobResult[P, R]] = enqueue_many(task, arguments)
        except SynchronousOnlyOperation:
            raise self._coroutine_error("enqueue_many", "await sync_to_async({}.enqueue_many)(…)") from None
        return results

    def _coroutine_error(self, method: str, instead: str) -> SynchronousOnlyOperation:
        return coroutine_error(f"{self.jobtype}.{method}", instead.format(self.name))


@overload
def task(function: Callable[P, R], /) -> FaktoryTask[P, R]: ...
@overload
def task(
    *, takes_context: Literal[True], **options: Unpack[TaskOptions]
) -> Callable[[Callable[Concatenate[JobContext, P], R]], FaktoryTask[P, R]]: ...
@overload
def task(
    *, takes_context: Literal[False] = False, **options: Unpack[TaskOptions]
) -> Callable[[Callable[P, R]], FaktoryTask[P, R]]: ...


def task(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Turn a `function` at module level into a task, `@task` or `@task(option=…)`, on every supported Django version.

    The task is registered under its name, by which workers find it. Raises TypeError for an unknown option, with the
    option that was probably meant, and InvalidTask for a value out of its range or a name that another task has.
    """
    if function is not None:
        return new_task(func=function, **options)
    return lambda func: new_task(func=func, **options)


def new_task(*, func: Callable[..., Any], name: str | None = None, **options: Any) -> FaktoryTask[..., Any]:
    """Build a task; serves as `FaktoryBackend.task_class`, because the option `name` is not Task.name."""
    if options.pop("run_after", None) is not None:
        raise TypeError("run_after belongs to one enqueue, not to the task; write .using(run_after=…)")
    unknown = options.keys() - _OPTIONS
    if unknown:
        raise TypeError(
            f"task {func.__module__}.{func.__qualname__}: unexpected option {min(unknown)!r}"
            f"{suggest_option(min(unknown), _OPTIONS)}; known: {', '.join(sorted(_OPTIONS))}"
        )
    return FaktoryTask(func=func, jobtype="" if name is None else name, **options)


def lookup(jobtype: str) -> FaktoryTask[..., Any]:
    """Return the task registered under this name. Raises UnknownJobType."""
    try:
        return _registry[jobtype]
    except KeyError:
        raise UnknownJobType(
            f"no task is registered as {jobtype!r:.120}; deploy the code that defines it, in (or imported by) "
            "the tasks.py of an installed app"
        ) from None


def find_registered(jobtype: str) -> FaktoryTask[..., Any] | None:
    """Return the task registered under this name, or None."""
    return _registry.get(jobtype)


def registered() -> tuple[FaktoryTask[..., Any], ...]:
    """Return every task registered in this process."""
    return tuple(_registry.values())


def autodiscover() -> None:
    """Import the `tasks` module of each installed app, so that its tasks are registered."""
    autodiscover_modules("tasks")


def import_tasks() -> list[tuple[str, Exception]]:
    """Import the `tasks` module of each installed app; return the modules that fail, in the apps' order.

    For commands and pages that must work although a module of the latest deployment does not.
    """
    broken = []
    for app in apps.get_app_configs():
        name = f"{app.name}.tasks"
        # A missing module is allowed, unlike one with an ImportError inside.
        if name in sys.modules or not module_has_submodule(app.module, "tasks"):
            continue
        try:
            __import__(name)
        except Exception as error:  # noqa: BLE001  (importing runs project code)
            broken.append((name, error))
    return broken


_registry: dict[str, FaktoryTask[..., Any]] = {}
# The annotations of TaskOptions are the only list of options, so that type checkers and this check agree.
_OPTIONS = TaskOptions.__annotations__.keys() | {"takes_context"}


def _register(task: FaktoryTask[..., Any]) -> None:
    """Register the first task of a function under its jobtype.

    Copies (by `using` or by unpickling) are the same task. Raises InvalidTask for a second task of the same name.
    """
    earlier = _registry.get(task.jobtype)
    # A module imported a second time (autoreload, importlib.reload) defines its tasks again; the newest one must win.
    if earlier is None or _was_reloaded(earlier.func, task.func):
        _registry[task.jobtype] = task
    elif earlier.func is not task.func:
        raise InvalidTask(
            f"task {task.module_path}: the name {task.jobtype!r} is already taken by {earlier.module_path}; give one "
            "of them another name="
        )
    # A worker finds one task by name, so two definitions that run differently would be ambiguous.
    elif options_at_run(earlier) != options_at_run(task):
        raise InvalidTask(
            f"task {task.module_path}: already defined with other options for the run (such as takes_context, "
            "atomic, timeout or retry_on); a worker finds one task by name: give one of them another name="
        )


def _was_reloaded(old: Callable[..., Any], new: Callable[..., Any]) -> bool:
    """Return True if `new` is `old` after its module was imported again."""
    same_path = (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)
    # All lambdas of a module share one qualified name, so a lambda cannot be recognized as the same function.
    return old is not new and same_path and new.__name__ != "<lambda>"


def _parse_call(position: int, call: object) -> tuple[list[Any], dict[str, Any]]:
    got = describe_value(call)
    match call:
        # The forms of Python's own APIs for calls; a task that takes a sequence and a dict gets the sequence as a list.
        case (tuple(), dict()) if isinstance(call, tuple):
            got = "a pair (args, kwargs); write all of them by name, or the first as a list if the task takes a list"
        case tuple():
            return list(call), {}
        case Mapping() if all(isinstance(key, str) for key in call):
            return [], dict(call)
    raise TypeError(
        f"enqueue_many: call {position}: expected a tuple of arguments, such as (42,), or a dict of keyword "
        f"arguments, got {got}"
    )
