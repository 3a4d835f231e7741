"""`Batch`: jobs that belong together, and what comes after them. Every job enqueued inside of one joins it.

Knows no model. Source: docs/batches.md; ADR 0011.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from django.db import connections

from . import brokers, conf
from .errors import FaktoryError
from .payloads import BatchStatus, JobPayload, NewBatch

if TYPE_CHECKING:
    from .tasks import FaktoryTask

_current: ContextVar[_Open | None] = ContextVar("django_faktory_batch", default=None)


class Callback(NamedTuple):
    """A task and its arguments, made by `task.callback(…)`: what a batch enqueues when its time has come."""

    task: FaktoryTask[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


class _Open:
    """A batch that jobs can join just now."""

    bid: str
    by = ""
    """The wid of who adds: the worker's, inside of a running member."""

    def __init__(self) -> None:
        self._outer: Token[_Open | None] | None = None

    def status(self) -> BatchStatus:
        """How it is doing. Raises UnknownBatch a week after its end."""
        return brokers.get_broker().batch_status(self.bid)

    def _open(self) -> None:
        self._outer = _current.set(self)

    def _shut(self) -> None:
        if self._outer is not None:
            _current.reset(self._outer)
            self._outer = None


class Batch(_Open):
    """Jobs that belong together: `with Batch(success=report.callback(42)) as batch: resize.enqueue(1)`.

    `complete` is enqueued when every job was executed once, `success` when every job has succeeded, and after
    `complete`; one of them at least is to be given: a task, or `task.callback(…)`. Inside of another batch it is its
    child.
    Where jobs live in this project's database, the batch, its jobs, and the rows written inside are one transaction: an
    exception leaves none of them. On a server elsewhere it leaves a batch that was never committed, and expires.
    """

    def __init__(
        self,
        *,
        description: str = "",
        success: FaktoryTask[..., Any] | Callback | None = None,
        complete: FaktoryTask[..., Any] | Callback | None = None,
    ) -> None:
        super().__init__()
        if success is None and complete is None:
            raise TypeError("Batch: expected success=… or complete=…, or both: a task, or task.callback(…)")
        self.bid = ""
        self.description = description
        self._success, self._complete = _job_of(success), _job_of(complete)
        self._scope: ExitStack | None = None

    def __enter__(self) -> Self:
        if self.bid:
            raise FaktoryError(f"batch {self.bid}: made already; add to it from its own jobs, by `context.batch`")
        outer = _current.get()
        broker = brokers.get_broker()
        _refuse_to_wait()
        with ExitStack() as scope:
            scope.enter_context(broker.atomic())
            made = NewBatch(
                description=self.description,
                parent_bid=outer.bid if outer else "",
                success=self._success,
                complete=self._complete,
            )
            self.bid = broker.new_batch(made, by=outer.by if outer else "")
            self._open()
            self._scope = scope.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._shut()
        scope, self._scope = self._scope, None
        assert scope is not None  # noqa: S101  (it was entered)
        if error is None:
            with scope:
                brokers.get_broker().commit_batch(self.bid)
        else:
            scope.__exit__(kind, error, traceback)


class RunningBatch(_Open):
    """The batch of a running job, `context.batch`: what is enqueued inside of `with context.batch:` joins it."""

    def __init__(self, bid: str, by: str) -> None:
        super().__init__()
        self.bid, self.by = bid, by

    def __enter__(self) -> Self:
        brokers.get_broker().open_batch(self.bid, by=self.by)
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._shut()


def current() -> _Open | None:
    """The batch that what is enqueued now joins."""
    return _current.get()


def _refuse_to_wait() -> None:
    """A batch on a server elsewhere cannot be part of a transaction here: its jobs would come after its commit."""
    for alias in conf.outbox():
        if not brokers.get_broker().transactional and connections[alias].in_atomic_block:
            raise FaktoryError(
                f"a batch on a Faktory server elsewhere: expected no open transaction of {alias!r}, got one; make it "
                "after the commit, by transaction.on_commit"
            )


def _job_of(callback: FaktoryTask[..., Any] | Callback | None) -> JobPayload | None:
    if callback is None:
        return None
    task, args, kwargs = callback if isinstance(callback, Callback) else Callback(callback)
    make = getattr(task.get_backend(), "callback_job", None)
    if make is None:
        raise TypeError(f"Batch: expected a task of FaktoryBackend as callback, got {task.module_path} of another one")
    job: JobPayload = make(task, args, kwargs)
    return job
