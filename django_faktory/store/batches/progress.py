"""Members and callbacks of batches: count their state changes and take the steps that follow.

Both happen in the transaction of the change. Code that changes a job of a batch calls `record_changes`. Rules:
`batch_rules`; ADR 0011.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import uuid4

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q

from ...core import batch_rules
from ...core.batch_rules import BatchStep, CallbackProgress, Kind
from ...core.job_parser import parse_job
from ...core.json import jsontext
from ...core.lifecycle import GONE, State
from ...core.logs import get_logger
from ...models import Batch, Job, JobQuerySet
from .. import notifier
from ..dialects import clock_of
from ..dialects.values import RunningJob
from ..jobs import keyed_push
from ..transactions import after_commit
from . import membership

logger = get_logger(__name__)

FIELDS = ("id", "jid", "bid", "callback_of", "has_run", "counts_failed")
"""Columns of a job that `record_changes` reads."""
COUNTER_FIELDS = ("pending", "unrun", "failed", "open_children", "unsucceeded_children", "is_broken")

HAS_BATCH = Q(bid__isnull=False) | Q(callback_of__isnull=False)


class Change(NamedTuple):
    """A job of a batch that moved to another state or was deleted."""

    job: Job | RunningJob
    """The job with `FIELDS` as they were before the change."""
    to: State | None
    succeeded: bool = False


def record_changes(connection: BaseDatabaseWrapper, changes: Iterable[Change], now: datetime) -> None:
    """Count these changes and take the steps that follow, inside the transaction that made them.

    Jobs without a batch may be among them. Batches are locked deepest first, then by bid.
    """
    deltas: dict[str, _BatchDelta] = {}
    for change in changes:
        if change.job.bid:
            deltas.setdefault(change.job.bid, _BatchDelta()).add_member(_count_change(connection, change))
        if change.job.callback_of:
            deltas.setdefault(change.job.callback_of, _BatchDelta()).callback_changes.append(change)
    if deltas:
        _apply_deltas(connection, deltas, now)


def members_of(jobs: JobQuerySet) -> list[Job]:
    """Return the members and callbacks of batches among these locked jobs, ordered by id, for `record_changes`."""
    return list(jobs.filter(HAS_BATCH).order_by("id").only(*FIELDS))


def split_members(jobs: JobQuerySet) -> tuple[JobQuerySet, JobQuerySet, list[Job]]:
    """Split these locked jobs into jobs without a batch and jobs of batches; return the latter also as rows.

    Pass the rows to `record_changes` after the change. A job that is not locked could enter a matching state in
    between, and would be changed without being counted: its batch would never finish.
    """
    members = members_of(jobs)
    all_jobs = Job.live.using(jobs.db)
    return jobs.filter(bid=None, callback_of=None), all_jobs.filter(pk__in=[job.pk for job in members]), members


def record_all(using: str, jobs: Sequence[Job], to: State | None) -> None:
    """Call `record_changes` for jobs that moved to the same state, at the database's time."""
    if jobs:
        connection = connections[using]
        now = clock_of(connection)
        record_changes(connection, [Change(job, to) for job in jobs], now)


def advance_batches(connection: BaseDatabaseWrapper, bids: Collection[str], now: datetime) -> int:
    """Take due steps of these batches; return how many batches had some."""
    return _apply_deltas(connection, {bid: _BatchDelta() for bid in bids}, now)


class _BatchDelta:
    """Changes to add to one batch."""

    def __init__(self) -> None:
        self.pending = self.unrun = self.failed = 0
        self.breaks = False
        self.callback_changes: list[Change] = []
        self.closed_children = self.succeeded_children = 0

    def add_member(self, counted: batch_rules.CounterChange) -> None:
        self.pending += counted.pending
        self.unrun += counted.unrun
        self.failed += counted.failed
        self.breaks |= counted.breaks

    def add_to(self, batch: Batch) -> None:
        batch.pending += self.pending
        batch.unrun += self.unrun
        batch.failed += self.failed
        batch.open_children -= self.closed_children
        batch.unsucceeded_children -= self.succeeded_children
        batch.is_broken |= self.breaks
        for change in self.callback_changes:
            _record_callback_end(batch, change)


def _count_change(connection: BaseDatabaseWrapper, change: Change) -> batch_rules.CounterChange:
    """Return the change of the batch's counters; mark a job that may run again, so that it is not counted twice."""
    job = change.job
    counted = batch_rules.count(
        change.to, has_run=job.has_run, counts_failed=job.counts_failed, succeeded=change.succeeded
    )
    if change.to in (State.RETRIES, State.DEAD) and not (job.has_run and job.counts_failed):
        Job.live.using(connection.alias).filter(pk=job.id).update(has_run=True, counts_failed=True)
    return counted


def _record_callback_end(batch: Batch, change: Change) -> None:
    """Record the end of a callback, if the change is one. A callback that failed does not block the parent batch."""
    callback_kind = batch_rules.ended_kind(batch)
    if change.succeeded:
        setattr(batch, f"{callback_kind}_st", CallbackProgress.FINISHED)
        setattr(batch, f"{callback_kind}_failed", False)
    elif change.to in (State.DEAD, State.DISCARDED, State.EXPIRED, GONE):
        setattr(batch, f"{callback_kind}_failed", True)
        # A dead callback can still be retried and succeed; after any other failed end it cannot.
        batch.is_broken |= change.to is not State.DEAD


def _apply_deltas(connection: BaseDatabaseWrapper, deltas: dict[str, _BatchDelta], now: datetime) -> int:
    """Add the changes to the batches and take their steps, level by level.

    A child is handled before its parent, which receives the results of all its children at once.
    """
    batches = Batch.objects.using(connection.alias)
    if len(deltas) == 1:  # one batch needs no lock order
        depths = dict.fromkeys(deltas, 0)
    else:
        depths = dict(batches.filter(bid__in=deltas).values_list("bid", "depth"))
    advanced = 0
    while depths:
        deepest = max(depths.values())
        level = [bid for bid, depth in depths.items() if depth == deepest]
        for batch in batches.filter(bid__in=level).order_by("bid").select_for_update():
            deltas[batch.bid].add_to(batch)
            was_reopened, old_complete_st = batch.is_reopened, batch.complete_st
            membership.close_overdue(batch, now)
            steps = batch_rules.advance(batch)
            advanced += bool(steps)
            for step in steps:
                _execute_step(connection, batch, step, now)
            if batch.parent_bid and steps:
                _notify_parent(deltas.setdefault(batch.parent_bid, _BatchDelta()), steps)
                # The parent is added to its own level, so that rows are locked deepest first.
                depths[batch.parent_bid] = batch.depth - 1
            # Most changes touch only counters; writing all columns would rewrite the callbacks' texts, which may be
            # long.
            has_changed = was_reopened or batch.complete_st != old_complete_st
            writes_all_columns = steps or deltas[batch.bid].callback_changes or has_changed
            batch.save(using=connection.alias, update_fields=None if writes_all_columns else COUNTER_FIELDS)
        for bid in level:
            del depths[bid]
    return advanced


def _notify_parent(delta: _BatchDelta, steps: Sequence[BatchStep]) -> None:
    delta.breaks |= BatchStep.MARK_PARENT_BROKEN in steps
    delta.closed_children += BatchStep.CLOSE_IN_PARENT in steps
    delta.succeeded_children += BatchStep.SUCCEED_IN_PARENT in steps


def _execute_step(connection: BaseDatabaseWrapper, batch: Batch, step: BatchStep, now: datetime) -> None:
    match step:
        case BatchStep.FIRE_COMPLETE:
            batch.complete_jid = _fire(connection, Kind.COMPLETE, batch, now)
        case BatchStep.FIRE_SUCCESS:
            batch.success_jid = _fire(connection, Kind.SUCCESS, batch, now)
        case BatchStep.END:
            batch.finished_at = now


def _fire(connection: BaseDatabaseWrapper, callback_kind: Kind, batch: Batch, now: datetime) -> str:
    """Enqueue a callback and return its jid, which is a new one if another job has the requested jid."""
    description = jsontext.members(batch.complete if callback_kind is Kind.COMPLETE else batch.success)
    custom = jsontext.last_members(description["custom"]) if description.get("custom", "null") != "null" else {}
    custom |= {"_bid": jsontext.encode(batch.bid), "_cb": jsontext.encode(str(callback_kind))}
    # The client's own `_pbid` would name a wrong parent.
    custom.pop("_pbid", None)
    if batch.parent_bid:
        custom["_pbid"] = jsontext.encode(batch.parent_bid)
    description["custom"] = jsontext.join(custom.items())
    job = parse_job(jsontext.join(description.items()))
    # In the transaction that counts the members, so that each callback is enqueued exactly once (ADR 0011).
    keyed_push.push(connection, [(0, job)], now, callback_of=batch.bid)
    # A push ignores a jid that is stored already, so check that the stored row is this callback.
    if not Job.live.using(connection.alias).filter(jid=job.jid, callback_of=batch.bid).exists():
        description["jid"] = jsontext.encode(uuid4().hex)
        job = parse_job(jsontext.join(description.items()))
        logger.warning("the callback's jid is another job's, it gets a new one bid=%s jid=%s", batch.bid, job.jid)
        keyed_push.push(connection, [(0, job)], now, callback_of=batch.bid)
    after_commit(connection.alias, notifier.announce, connection.alias, {job.queue})
    return job.jid
