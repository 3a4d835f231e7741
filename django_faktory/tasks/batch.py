"""`Batch`: group jobs and run callbacks when they are done. Jobs enqueued inside `with Batch(…)` join it.

Imports no model. Source: docs/batches.md; ADR 0011.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from asgiref.sync import sync_to_async
from django.db import connections
from django.dispatch import Signal

from .. import brokers, conf
from ..brokers.base import Broker
from ..core.payloads import BatchStatus, JobPayload, NewBatch
from ..errors import BatchClosed, FaktoryError
from .compat import Task
from .coroutines import names_awaitable

__all__ = ["Batch", "Callback", "RunningBatch", "batch_committed"]

current_batch: ContextVar[_ActiveBatch | None] = ContextVar("django_faktory_batch", default=None)
"""The batch that jobs enqueued now join."""

_of_job: ContextVar[RunningBatch | None] = ContextVar("django_faktory_batch_of_job", default=None)
"""The batch of the job that runs here; see `Batch.of_this_job`."""

batch_committed = Signal()
"""Signal, sent inside the transaction of a `with Batch(…)`, at its end; the sender is `Batch`."""


_IN_THREAD = "await sync_to_async(function)(), with the block in that function: a batch is one transaction"


class Callback(NamedTuple):
    """A task and its arguments, made by `task.callback(…)`: the job that a batch enqueues when it is done."""

    task: Task[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


class _ActiveBatch:
    """Base of the batches that newly enqueued jobs can join."""

    bid: str
    caller_wid = ""
    """The wid of the worker that adds jobs; set only inside a running member."""

    def __init__(self) -> None:
        # A stack, because a RunningBatch may be entered again while it is open.
        self._tokens: list[Token[_ActiveBatch | None]] = []

    @names_awaitable("status", "await sync_to_async(batch.status)()")
    def status(self) -> BatchStatus:
        """Read the counters and the progress: one row, whatever the number of jobs.

        Raises UnknownBatch if the batch ended more than FAKTORY["BATCH_TTL"] seconds ago.
        """
        return brokers.get_broker().batch_status(self.bid)

    def _open(self) -> None:
        self._tokens.append(current_batch.set(self))

    def _leave(self) -> None:
        current_batch.reset(self._tokens.pop())


class Batch(_ActiveBatch):
    """Group the jobs that are enqueued inside `with Batch(…) as batch:`; a batch inside another one is its child.

    `complete` is enqueued when every job was executed once. `success` is enqueued when every job has succeeded, and
    after `complete`. At least one is required: a task, or `task.callback(…)`. `description` is shown to people.

    If jobs are stored in this project's database, the batch, its jobs and the rows written inside are one transaction,
    and an exception rolls back all of them. On a remote server an exception leaves an uncommitted batch, which expires.
    Raises TypeError for another kind of callback, BatchClosed if it is entered twice.
    """

    def __init__(
        self,
        *,
        description: str = "",
        success: Task[..., Any] | Callback | None = None,
        complete: Task[..., Any] | Callback | None = None,
    ) -> None:
        callbacks = [_check_callback(callback) for callback in (success, complete) if callback is not None]
        if not callbacks:
            raise TypeError("Batch: expected success=… or complete=…, or both: a task, or task.callback(…)")
        super().__init__()
        self.bid = ""
        self.description = description
        self._success, self._complete = _callback_job(success), _callback_job(complete)
        # Set while the `with` block runs; closing it commits or rolls back.
        self._scope: ExitStack | None = None

    @classmethod
    @names_awaitable("Batch.find", "await sync_to_async(Batch.find)(…)")
    def find(cls, bid: str) -> RunningBatch:
        """Return the batch with this id, to read its status. Raises UnknownBatch."""
        brokers.get_broker().batch_status(bid)
        return RunningBatch(bid, "")

    @classmethod
    def of_this_job(cls) -> RunningBatch | None:
        """Return the batch of the job that runs here, as a member or as a callback; None for any other code."""
        return _of_job.get()

    @names_awaitable("with Batch(…)", _IN_THREAD)
    def __enter__(self) -> Self:
        if self.bid:
            raise BatchClosed(self.bid, "it was entered before; add jobs to it from its own jobs, with context.batch")
        parent = current_batch.get()
        store = brokers.get_broker()
        _refuse_open_transaction(store)
        # Closes the transaction if new_batch raises; pop_all() hands it to __exit__ otherwise.
        with ExitStack() as scope:
            scope.enter_context(store.atomic())
            batch = NewBatch(
                description=self.description,
                parent_bid=parent.bid if parent else "",
                success=self._success,
                complete=self._complete,
            )
            self.bid = store.new_batch(batch, caller_wid=parent.caller_wid if parent else "")
            self._open()
            self._scope = scope.pop_all()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()
        scope, self._scope = self._scope, None
        assert scope is not None  # noqa: S101  (__enter__ has set it)
        if error is None:
            with scope:
                # Inside the scope, so that the jobs and the commit are one transaction.
                brokers.get_broker().commit_batch(self.bid)
                batch_committed.send(type(self))
        else:
            scope.__exit__(error_type, error, traceback)

    if not TYPE_CHECKING:  # type checkers refuse it

        async def __aenter__(self):
            """Raise a TypeError that says what to write."""
            # The transaction would be open in the thread that all coroutines of the process share.
            raise TypeError(f"async with Batch(…): expected a function that is not a coroutine: write {_IN_THREAD}")

        async def __aexit__(self, *_):
            """Exist, so that Python calls `__aenter__`."""


class RunningBatch(_ActiveBatch):
    """An existing batch: a running job's own (`context.batch`), or one returned by `Batch.find`.

    Jobs enqueued inside `with context.batch:` join it; use `async with` in a coroutine. Raises BatchClosed, with the
    reason, if nothing can be added.
    """

    def __init__(self, bid: str, caller_wid: str) -> None:
        super().__init__()
        self.bid, self.caller_wid = bid, caller_wid

    @property
    def parent(self) -> RunningBatch | None:
        """The parent batch, so that a callback can add the next step to it; None for a root batch.

        Each access is a query. Raises UnknownBatch.
        """
        parent_bid = self.status().parent_bid
        return RunningBatch(parent_bid, self.caller_wid) if parent_bid else None

    def __enter__(self) -> Self:
        # BATCH OPEN is not needed: while the running member adds jobs, it keeps its batch and each ancestor from firing
        # their callbacks.
        brokers.get_broker().check_batch(self.bid, caller_wid=self.caller_wid)
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    async def __aenter__(self) -> Self:
        # check_batch() queries the database, which Django permits in threads only.
        await sync_to_async(brokers.get_broker().check_batch)(self.bid, caller_wid=self.caller_wid)
        self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave()


def enter_job(bid: str, wid: str) -> None:
    """Set the batch that `Batch.of_this_job` returns, in the current context."""
    _of_job.set(RunningBatch(bid, wid))


@contextmanager
def without_batch() -> Iterator[None]:
    """Enqueue inside without joining any batch.

    Used where a job is run while another one is being enqueued, as the test helpers do.
    """
    token = current_batch.set(None)
    try:
        yield
    finally:
        current_batch.reset(token)


def _refuse_open_transaction(broker: Broker) -> None:
    """Raise FaktoryError inside an open transaction if batches live on a remote server.

    The jobs of the transaction go through the outbox, so they would arrive after the batch was committed.
    """
    for alias in () if broker.transactional else conf.outbox():
        if connections[alias].in_atomic_block:
            raise FaktoryError(
                f"a batch on a remote Faktory server: expected no open transaction of {alias!r}, got one; create it "
                "after the commit, with transaction.on_commit"
            )


def _check_callback(callback: Task[..., Any] | Callback) -> Callback:
    checked = callback if isinstance(callback, Callback) else Callback(callback)
    backend = getattr(checked.task, "get_backend", None)
    if backend is None:
        raise TypeError(f"Batch: expected a task, or task.callback(…), as callback, got {callback!r:.80}")
    if not getattr(backend(), "stores_batches", False):
        raise TypeError(
            f"Batch: expected a task of FaktoryBackend as callback, got {checked.task!r:.80}; backends for tests"
            " store no batches: use FaktoryBackend, a database and drain()"
        )
    return checked


def _callback_job(callback: Task[..., Any] | Callback | None) -> JobPayload | None:
    if callback is None:
        return None
    checked = _check_callback(callback)
    # Any: this module must not import `backend`.
    backend: Any = checked.task.get_backend()
    job: JobPayload = backend.callback_job(checked.task, checked.args, checked.kwargs)
    return job
