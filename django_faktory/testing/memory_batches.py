"""In-memory batches with the rules of `batch_rules`, for backends without a job table. Imports no model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from uuid import uuid4

from django.db import transaction
from django.utils import timezone

from .. import conf
from ..core import batch_rules
from ..core.batch_rules import BatchStep, CallbackProgress, Kind
from ..core.lifecycle import State
from ..core.payloads import BatchStatus, JobPayload, NewBatch
from ..errors import BatchClosed, FaktoryError, UnknownBatch


@dataclass(slots=True, kw_only=True)
class MemoryBatch:
    """A batch with the counters that `batch_rules` reads."""

    bid: str
    definition: NewBatch
    depth: int = 0
    created_at: datetime = field(default_factory=timezone.now)
    working: int = 0
    """Number of its members that run now; they may add jobs."""

    total: int = 0
    pending: int = 0
    unrun: int = 0
    failed: int = 0
    open_children: int = 0
    unsucceeded_children: int = 0
    is_broken: bool = False
    complete_st: str = CallbackProgress.NOT_YET
    success_st: str = CallbackProgress.NOT_YET
    complete_failed: bool = False
    success_failed: bool = False
    reported_broken: bool = False
    reported_complete: bool = False
    reported_success: bool = False
    is_committed: bool = False
    is_over: bool = False
    # The rules read these two. A batch in memory is never opened again, and does not expire.
    is_reopened: bool = False
    is_expired: bool = False

    @property
    def has_complete(self) -> bool:
        """True if it has a complete callback; see `batch_rules.BatchColumns`."""
        return self.definition.complete is not None

    @property
    def has_success(self) -> bool:
        """True if it has a success callback; see `batch_rules.BatchColumns`."""
        return self.definition.success is not None


class MemoryBatchStore:
    """The batch store that `Batch` requires.

    `fire` receives a callback when it is due, `forget` the ids of batches that an exception rolled back.
    """

    transactional = True

    def __init__(
        self, *, fire: Callable[[JobPayload, str, Kind], None], forget: Callable[[Collection[str]], None]
    ) -> None:
        self.by_bid: dict[str, MemoryBatch] = {}
        self._fire = fire
        self._forget = forget
        self._nesting = 0  # of `atomic`: due steps are taken when the outermost block ends

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Open a transaction; see `BatchStore`. Callbacks fire when the outermost block ends, as after a commit."""
        # A shallow copy of each batch suffices as a savepoint, because its fields are immutable.
        savepoint = {bid: replace(batch) for bid, batch in self.by_bid.items()}
        self._nesting += 1
        try:
            with _transaction():
                yield
        except BaseException:
            rolled_back = self.by_bid.keys() - savepoint.keys()
            self.by_bid = savepoint
            self._forget(rolled_back)
            raise
        finally:
            self._nesting -= 1
        self.settle()

    # `caller_wid` is ignored: there is one thread, so a caller inside a job is the running job.
    def new_batch(self, batch: NewBatch, *, caller_wid: str = "") -> str:  # noqa: ARG002
        """Create a batch and return its id."""
        stored = MemoryBatch(bid=f"b-{uuid4().hex}", definition=batch)
        if batch.parent_bid:
            parent = self._get_open(batch.parent_bid)
            parent.open_children += 1
            parent.unsucceeded_children += 1
            stored.depth = parent.depth + 1
        self.by_bid[stored.bid] = stored
        return stored.bid

    def check_batch(self, bid: str, *, caller_wid: str = "") -> None:  # noqa: ARG002
        """Raise UnknownBatch or BatchClosed unless jobs may join this batch."""
        self._get_open(bid)

    def commit_batch(self, bid: str) -> None:
        """Mark a batch as completely defined."""
        self._get(bid).is_committed = True

    def batch_status(self, bid: str) -> BatchStatus:
        """Return the counters of a batch. Raises UnknownBatch."""
        batch = self._get(bid)
        return BatchStatus(
            bid=bid,
            parent_bid=batch.definition.parent_bid,
            description=batch.definition.description,
            created_at=batch.created_at,
            total=batch.total,
            pending=batch.pending,
            failed=batch.failed,
            complete_st=batch.complete_st,
            success_st=batch.success_st,
            is_broken=batch.is_broken,
        )

    def refusal(self, job: JobPayload) -> FaktoryError | None:
        """Return the error if this job may not join the batch that it names, else None."""
        try:
            if job.options and job.options.bid:
                self._get_open(job.options.bid)
        except FaktoryError as error:
            return error
        return None

    def record_member(self, job: JobPayload) -> None:
        """Count a new member."""
        if batch := self._batch_of(job):
            batch.total += 1
            batch.pending += 1
            batch.unrun += 1

    @contextmanager
    def running(self, job: JobPayload, callback_of: str = "") -> Iterator[None]:
        """Allow a running member to add to its batch, and a callback to the ancestors of its batch `callback_of`."""
        # W26: a callback may add to the parents of its batch, because their success still depends on it.
        open_batches = [*self._ancestors(callback_of)] if callback_of else []
        if own_batch := self._batch_of(job):
            open_batches.append(own_batch)
        for batch in open_batches:
            batch.working += 1
        try:
            yield
        finally:
            for batch in open_batches:
                batch.working -= 1

    def record_end(self, job: JobPayload, to: State) -> None:
        """Count a member's end. A member given up after too many failures counts as dead."""
        if batch := self._batch_of(job):
            # Failed attempts before this end were not counted, so its flags are those of a new member.
            changes = batch_rules.count(to, has_run=False, counts_failed=False, succeeded=to is State.SUCCEEDED)
            batch.pending += changes.pending
            batch.unrun += changes.unrun
            batch.failed += changes.failed
            batch.is_broken |= changes.breaks
            self.settle()

    def record_callback_end(self, bid: str, kind: Kind, to: State) -> None:
        """Record a callback's end."""
        batch = self._get(bid)
        if to is State.SUCCEEDED:
            setattr(batch, f"{kind}_st", CallbackProgress.FINISHED)
        else:
            setattr(batch, f"{kind}_failed", True)
            # A dead callback can still be retried and succeed; a discarded one cannot.
            batch.is_broken |= to is State.DISCARDED
        self.settle()

    def settle(self) -> None:
        """Perform all due steps, those of the deepest batch first, until none is left."""
        # Children first, as in the store: a parent's step may depend on the final state of its children.
        # any() stops at the first batch with steps, so that deeper batches are examined again after each.
        while not self._nesting and any(map(self._advance, self._deepest_first())):
            pass

    def _deepest_first(self) -> list[MemoryBatch]:
        return sorted(self.by_bid.values(), key=lambda batch: -batch.depth)

    def _advance(self, batch: MemoryBatch) -> bool:
        steps = batch_rules.advance(batch)
        parent = self.by_bid.get(batch.definition.parent_bid)
        for step in steps:
            match step, parent:
                case BatchStep.FIRE_COMPLETE, _ if batch.definition.complete:
                    self._fire(batch.definition.complete, batch.bid, Kind.COMPLETE)
                case BatchStep.FIRE_SUCCESS, _ if batch.definition.success:
                    self._fire(batch.definition.success, batch.bid, Kind.SUCCESS)
                case BatchStep.MARK_PARENT_BROKEN, MemoryBatch():
                    parent.is_broken = True
                case BatchStep.CLOSE_IN_PARENT, MemoryBatch():
                    parent.open_children -= 1
                case BatchStep.SUCCEED_IN_PARENT, MemoryBatch():
                    parent.unsucceeded_children -= 1
                case BatchStep.END, _:
                    batch.is_over = True
        return bool(steps)

    def _get_open(self, bid: str) -> MemoryBatch:
        batch = self._get(bid)
        # From here on the counters that a callback depends on must not change (ADR 0011).
        if batch.complete_st or batch.success_st:
            raise BatchClosed(bid, "a callback of it was enqueued already, nothing can be added any more")
        if batch.is_committed and not batch.working:
            raise BatchClosed(bid, "it is committed, so only one of its own jobs, while it runs, can add to it")
        return batch

    def _get(self, bid: str) -> MemoryBatch:
        if bid not in self.by_bid:
            raise UnknownBatch(bid)
        return self.by_bid[bid]

    def _ancestors(self, bid: str) -> Iterator[MemoryBatch]:
        while (batch := self.by_bid.get(bid)) and (bid := batch.definition.parent_bid) in self.by_bid:
            yield self.by_bid[bid]

    def _batch_of(self, job: JobPayload) -> MemoryBatch | None:
        return self.by_bid.get(job.options.bid) if job.options and job.options.bid else None


@contextmanager
def _transaction() -> Iterator[None]:
    """Open a database transaction for a `with Batch(…)` if the test may use the database."""
    with ExitStack() as scope:
        with suppress(AssertionError, RuntimeError):  # raised by SimpleTestCase and pytest-django if it may not
            scope.enter_context(transaction.atomic(using=conf.get("DATABASE")))
        yield
