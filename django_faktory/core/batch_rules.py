"""Batch rules: how each end of a member counts, and which steps the counters trigger.

The only place that implements them. Pure: callers load and lock the rows and execute the returned steps. Source: the
batches page of Faktory's specification, with the points that docs/batches.md fixes; ADR 0011.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import NamedTuple, Protocol

from .lifecycle import GONE, State


class Kind(StrEnum):
    """Kind of callback, spelled as in `custom._cb`."""

    COMPLETE = "complete"
    SUCCESS = "success"


class CallbackProgress(StrEnum):
    """Progress of a callback, in the values that BATCH STATUS reports."""

    NOT_YET = ""
    ENQUEUED = "1"
    FINISHED = "2"


class BatchStep(Enum):
    """Steps the caller must execute for a batch, in this order."""

    FIRE_COMPLETE = "enqueue the complete callback"
    FIRE_SUCCESS = "enqueue the success callback"
    MARK_PARENT_BROKEN = "mark the parent as unable to succeed"
    CLOSE_IN_PARENT = "count the child as closed in its parent"
    SUCCEED_IN_PARENT = "count the child as succeeded in its parent"
    END = "record its end; it is purged later"


class CounterChange(NamedTuple):
    """Changes of a batch's counters after one member changed, and the member's new flags."""

    pending: int = 0
    unrun: int = 0
    failed: int = 0
    breaks: bool = False
    has_run: bool = False
    counts_failed: bool = False


def count(to: State | None, *, has_run: bool, counts_failed: bool, succeeded: bool = False) -> CounterChange:
    """Return what a member adds to its batch when it moves to state `to` (`GONE`: its row is deleted).

    `has_run` and `counts_failed` record how the member was counted so far. `succeeded` distinguishes the end after an
    ACK from the other ends. States in which a member waits or runs add nothing.
    """
    first_run = 0 if has_run else -1
    if succeeded:
        return CounterChange(-1, first_run, -int(counts_failed), has_run=True)
    # A dead or failing member stays pending: it may still be retried, and success may still come.
    if to in (State.RETRIES, State.DEAD):
        return CounterChange(0, first_run, int(not counts_failed), has_run=True, counts_failed=True)
    # Ended without success and without a retry: the batch can complete, but never succeed.
    if to in (State.DISCARDED, State.EXPIRED, GONE):
        return CounterChange(-1, first_run, -int(counts_failed), breaks=True, has_run=True)
    return CounterChange(has_run=has_run, counts_failed=counts_failed)


class BatchColumns(Protocol):
    """Columns of a batch row that these rules read and write."""

    pending: int
    unrun: int
    open_children: int
    unsucceeded_children: int
    is_broken: bool
    complete_st: str
    success_st: str
    complete_failed: bool
    success_failed: bool
    reported_broken: bool
    reported_complete: bool
    reported_success: bool

    @property
    def is_committed(self) -> bool:
        """Return whether the batch was committed, so its definition is complete."""

    @property
    def is_reopened(self) -> bool:
        """Return whether the batch was opened again after its commit and not committed since."""

    @property
    def is_expired(self) -> bool:
        """Return whether the batch was not committed in time."""

    @property
    def has_complete(self) -> bool:
        """Return whether there is a callback for when all members were executed."""

    @property
    def has_success(self) -> bool:
        """Return whether there is a callback for when all members succeeded."""

    @property
    def is_over(self) -> bool:
        """Return whether the end of the batch was recorded."""


def advance(batch: BatchColumns) -> list[BatchStep]:
    """Update the row for all steps that are due and return the steps to execute.

    Idempotent: a second call returns nothing until the counters change. (END is recorded by the caller that executes
    it.)
    """
    steps: list[BatchStep] = []
    # Jobs may still be added to a reopened batch, and a callback that fired now could not be taken back.
    if batch.is_committed and batch.is_reopened:
        return steps
    if batch.is_committed:
        _fire_callbacks(batch, steps)
    # An expired batch fires no callback, but its parent must learn that it will never succeed.
    if batch.is_committed or batch.is_expired:
        _notify_parent(batch, steps)
    return steps


def is_open(batch: BatchColumns) -> bool:
    """Return whether any client may add jobs: the batch is uncommitted, or was opened again."""
    return not batch.is_committed or batch.is_reopened


def has_fired(batch: BatchColumns) -> bool:
    """Return whether a callback was enqueued, after which no job can be added."""
    complete, success = batch.complete_st != CallbackProgress.NOT_YET, batch.success_st != CallbackProgress.NOT_YET
    return (batch.has_complete and complete) or (batch.has_success and success)


def ended_kind(batch: BatchColumns) -> Kind:
    """Return which callback is ending now.

    Only one runs at a time; the jid cannot distinguish them because a client may give both the same one.
    """
    return Kind.COMPLETE if batch.complete_st == CallbackProgress.ENQUEUED else Kind.SUCCESS


def _fire_callbacks(batch: BatchColumns, steps: list[BatchStep]) -> None:
    # A batch without a complete callback passes this stage at once, because success waits for it.
    if batch.complete_st == CallbackProgress.NOT_YET and batch.unrun == 0 and batch.open_children == 0:
        batch.complete_st = CallbackProgress.ENQUEUED if batch.has_complete else CallbackProgress.FINISHED
        if batch.has_complete:
            steps.append(BatchStep.FIRE_COMPLETE)
    if (
        batch.success_st == CallbackProgress.NOT_YET
        and batch.complete_st == CallbackProgress.FINISHED
        and _have_all_succeeded(batch)
    ):
        batch.success_st = CallbackProgress.ENQUEUED if batch.has_success else CallbackProgress.FINISHED
        if batch.has_success:
            steps.append(BatchStep.FIRE_SUCCESS)


def _notify_parent(batch: BatchColumns, steps: list[BatchStep]) -> None:
    # Each flag is written in the same transaction as the change of the parent's counters, so each is applied once.
    if (batch.is_broken or batch.is_expired) and not batch.reported_broken:
        batch.reported_broken = True
        steps.append(BatchStep.MARK_PARENT_BROKEN)
    if not batch.reported_complete and _is_closed(batch):
        batch.reported_complete = True
        steps.append(BatchStep.CLOSE_IN_PARENT)
    if not batch.reported_success and batch.success_st == CallbackProgress.FINISHED:
        batch.reported_success = True
        steps.append(BatchStep.SUCCEED_IN_PARENT)
    if not batch.is_over and _is_final(batch):
        steps.append(BatchStep.END)


def _have_all_succeeded(batch: BatchColumns) -> bool:
    """Return whether all members and children succeeded."""
    return batch.pending == 0 and batch.unsucceeded_children == 0 and not batch.is_broken


def _is_closed(batch: BatchColumns) -> bool:
    """Return whether no callback is running or still to come, so that the parent's complete callback may fire."""
    # A failed callback counts as closed: otherwise one dead callback would block every ancestor.
    if batch.is_expired or batch.complete_failed:
        return True
    if batch.complete_st != CallbackProgress.FINISHED:
        return False
    return batch.success_st == CallbackProgress.FINISHED or batch.success_failed or not _have_all_succeeded(batch)


def _is_final(batch: BatchColumns) -> bool:
    if batch.is_expired or batch.success_st == CallbackProgress.FINISHED:
        return True
    # Children are waited for: a child that still runs reports to this row later.
    return batch.is_broken and batch.pending == 0 and batch.reported_complete and batch.open_children == 0
