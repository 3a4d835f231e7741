"""A batch's life: how each end of a member counts, and what the counts lead to. The only place that knows.

Pure: callers bring the rows, lock them, and carry out the steps. Source: the batches page of the original's
specification, with the points that docs/batches.md fixes; ADR 0011.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import NamedTuple, Protocol

from .lifecycle import GONE, State


class Kind(StrEnum):
    """A callback's; spelled as `custom._cb` has it."""

    COMPLETE = "complete"
    SUCCESS = "success"


class Progress(StrEnum):
    """A callback's way, as BATCH STATUS tells it."""

    NOT_YET = ""
    ENQUEUED = "1"
    FINISHED = "2"


class Step(Enum):
    """What is to be done for a batch, in this order."""

    FIRE_COMPLETE = "enqueue the complete callback"
    FIRE_SUCCESS = "enqueue the success callback"
    TELL_BROKEN = "tell the parent that success cannot come"
    TELL_COMPLETE = "tell the parent that this child is no longer open"
    TELL_SUCCESS = "tell the parent that this child succeeded"
    END = "keep it for a while, then let it go"


class Counted(NamedTuple):
    """What a member's change adds to its batch, and how the member counts from now on."""

    pending: int = 0
    unrun: int = 0
    failed: int = 0
    breaks: bool = False
    has_run: bool = False
    counts_failed: bool = False


def count(to: State | None, *, has_run: bool, counts_failed: bool, succeeded: bool = False) -> Counted:
    """What it adds that a member goes `to` this state (`GONE`: its row goes), having counted so far as the flags say.

    `succeeded` tells the end after an ACK from the others. A state in which it waits or works adds nothing.
    """
    first_run = 0 if has_run else -1
    if succeeded:
        return Counted(-1, first_run, -int(counts_failed), has_run=True)
    if to in (State.RETRIES, State.DEAD):
        return Counted(0, first_run, int(not counts_failed), has_run=True, counts_failed=True)
    if to in (State.DISCARDED, State.EXPIRED, GONE):
        return Counted(-1, first_run, -int(counts_failed), breaks=True, has_run=True)
    return Counted(has_run=has_run, counts_failed=counts_failed)


class Batch(Protocol):
    """The row, as far as these rules need it."""

    pending: int
    unrun: int
    open_children: int
    unsucceeded_children: int
    is_broken: bool
    complete_st: str
    success_st: str
    complete_failed: bool
    success_failed: bool
    told_broken: bool
    told_complete: bool
    told_success: bool

    @property
    def is_committed(self) -> bool:
        """Whether its definition is complete."""

    @property
    def is_reopened(self) -> bool:
        """Whether it was opened again since, and not committed once more."""

    @property
    def is_expired(self) -> bool:
        """Whether it was not committed in time."""

    @property
    def has_complete(self) -> bool:
        """Whether it has a callback for when all were executed."""

    @property
    def has_success(self) -> bool:
        """Whether it has a callback for when all succeeded."""

    @property
    def is_over(self) -> bool:
        """Whether its end was noted."""


def advance(batch: Batch) -> list[Step]:
    """Take the steps that are due: note them in the row, and return them for the caller to carry out.

    Idempotent: a second call finds nothing, until the counters change (END is noted by who carries it out).
    """
    steps: list[Step] = []
    if batch.is_committed and batch.is_reopened:
        return steps
    if batch.is_committed:
        _fire(batch, steps)
    if batch.is_committed or batch.is_expired:
        _tell(batch, steps)
    return steps


def is_open(batch: Batch) -> bool:
    """Whether any client may add to it: it is not committed, or was opened again."""
    return not batch.is_committed or batch.is_reopened


def has_fired(batch: Batch) -> bool:
    """Whether a callback of it was enqueued: nothing can be added any more."""
    complete, success = batch.complete_st != Progress.NOT_YET, batch.success_st != Progress.NOT_YET
    return (batch.has_complete and complete) or (batch.has_success and success)


def ended_kind(batch: Batch) -> Kind:
    """Which callback it is that ends now: there is one at a time, and their jids may be the same."""
    return Kind.COMPLETE if batch.complete_st == Progress.ENQUEUED else Kind.SUCCESS


def _fire(batch: Batch, steps: list[Step]) -> None:
    if batch.complete_st == Progress.NOT_YET and batch.unrun == 0 and batch.open_children == 0:
        batch.complete_st = Progress.ENQUEUED if batch.has_complete else Progress.FINISHED
        if batch.has_complete:
            steps.append(Step.FIRE_COMPLETE)
    if batch.success_st == Progress.NOT_YET and batch.complete_st == Progress.FINISHED and _is_good(batch):
        batch.success_st = Progress.ENQUEUED if batch.has_success else Progress.FINISHED
        if batch.has_success:
            steps.append(Step.FIRE_SUCCESS)


def _tell(batch: Batch, steps: list[Step]) -> None:
    if (batch.is_broken or batch.is_expired) and not batch.told_broken:
        batch.told_broken = True
        steps.append(Step.TELL_BROKEN)
    if not batch.told_complete and _is_closed(batch):
        batch.told_complete = True
        steps.append(Step.TELL_COMPLETE)
    if not batch.told_success and batch.success_st == Progress.FINISHED:
        batch.told_success = True
        steps.append(Step.TELL_SUCCESS)
    if not batch.is_over and _can_change_no_more(batch):
        steps.append(Step.END)


def _is_good(batch: Batch) -> bool:
    """Whether all members and children succeeded."""
    return batch.pending == 0 and batch.unsucceeded_children == 0 and not batch.is_broken


def _is_closed(batch: Batch) -> bool:
    """Whether no callback is under way or about to be: the parent's may come."""
    if batch.is_expired or batch.complete_failed:
        return True
    if batch.complete_st != Progress.FINISHED:
        return False
    return batch.success_st == Progress.FINISHED or batch.success_failed or not _is_good(batch)


def _can_change_no_more(batch: Batch) -> bool:
    if batch.is_expired or batch.success_st == Progress.FINISHED:
        return True
    return batch.is_broken and batch.pending == 0 and batch.told_complete and batch.open_children == 0
