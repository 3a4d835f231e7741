"""The rules of a batch, without a database: what counts, which callback follows, for any order of events."""

import random
from types import SimpleNamespace

import pytest

from django_faktory.core.batch_rules import BatchStep, CallbackProgress, Kind, advance, count
from django_faktory.core.lifecycle import GONE, State

pytestmark = pytest.mark.core


def batch(**changes):
    """Return a committed batch with both callbacks and no members."""
    plain = {
        "is_committed": True, "is_reopened": False, "is_expired": False, "pending": 0, "unrun": 0, "open_children": 0,
        "unsucceeded_children": 0, "is_broken": False, "has_complete": True, "has_success": True, "complete_st": "",
        "success_st": "", "complete_failed": False, "success_failed": False, "reported_broken": False,
        "reported_complete": False, "reported_success": False, "is_over": False,
    }  # fmt: skip
    return SimpleNamespace(**plain | changes)


def test_an_uncommitted_batch_takes_no_step():
    assert advance(batch(is_committed=False)) == []


def test_a_reopened_batch_takes_no_step_until_it_is_closed():
    one = batch(is_reopened=True)
    assert advance(one) == []
    one.is_reopened = False
    assert advance(one) == [BatchStep.FIRE_COMPLETE]


def test_complete_fires_once_every_member_has_run_and_no_child_is_open():
    assert advance(batch(unrun=1, pending=1)) == []
    assert advance(batch(open_children=1, unsucceeded_children=1)) == []
    assert advance(batch(pending=1)) == [BatchStep.FIRE_COMPLETE]


def test_success_fires_only_after_the_complete_callback_has_finished():
    one = batch()
    assert advance(one) == [BatchStep.FIRE_COMPLETE]
    assert advance(one) == []
    one.complete_st = CallbackProgress.FINISHED
    assert advance(one) == [BatchStep.FIRE_SUCCESS]
    one.success_st = CallbackProgress.FINISHED
    assert advance(one) == [BatchStep.CLOSE_IN_PARENT, BatchStep.SUCCEED_IN_PARENT, BatchStep.END]


def test_a_batch_without_a_callback_of_a_kind_skips_that_step():
    assert advance(batch(has_complete=False)) == [BatchStep.FIRE_SUCCESS]
    one = batch(has_success=False, complete_st=CallbackProgress.FINISHED)
    assert advance(one) == [BatchStep.CLOSE_IN_PARENT, BatchStep.SUCCEED_IN_PARENT, BatchStep.END]


@pytest.mark.parametrize("reason", [{"pending": 1}, {"unsucceeded_children": 1}])
def test_a_batch_closes_in_its_parent_while_its_success_is_pending(reason):
    assert advance(batch(complete_st=CallbackProgress.FINISHED, **reason)) == [BatchStep.CLOSE_IN_PARENT]


def test_a_broken_batch_marks_its_parent_broken_and_ends():
    one = batch(complete_st=CallbackProgress.FINISHED, is_broken=True)
    assert advance(one) == [BatchStep.MARK_PARENT_BROKEN, BatchStep.CLOSE_IN_PARENT, BatchStep.END]


def test_a_failed_complete_callback_does_not_block_the_parent():
    one = batch(complete_st=CallbackProgress.ENQUEUED, complete_failed=True)
    assert advance(one) == [BatchStep.CLOSE_IN_PARENT]
    one.complete_st = CallbackProgress.FINISHED
    assert advance(one) == [BatchStep.FIRE_SUCCESS], "a manual retry continues the batch"


def test_an_expired_batch_closes_in_its_parent_and_fires_no_callback():
    one = batch(is_committed=False, is_expired=True)
    assert advance(one) == [BatchStep.MARK_PARENT_BROKEN, BatchStep.CLOSE_IN_PARENT, BatchStep.END]


@pytest.mark.parametrize(
    ("to", "succeeded", "added"),
    [
        (GONE, True, (-1, -1, 0, False)),
        (State.SUCCEEDED, True, (-1, -1, 0, False)),
        (State.RETRIES, False, (0, -1, 1, False)),
        (State.DEAD, False, (0, -1, 1, False)),
        (State.DISCARDED, False, (-1, -1, 0, True)),
        (State.EXPIRED, False, (-1, -1, 0, True)),
        (GONE, False, (-1, -1, 0, True)),
        (State.ENQUEUED, False, (0, 0, 0, False)),
        (State.WORKING, False, (0, 0, 0, False)),
        (State.SCHEDULED, False, (0, 0, 0, False)),
    ],
)
def test_each_new_state_of_a_member_changes_the_counters_once(to, succeeded, added):
    counted = count(to, has_run=False, counts_failed=False, succeeded=succeeded)
    assert counted[:4] == added


@pytest.mark.parametrize("seed", range(200))
def test_counters_stay_correct_for_any_order_of_member_events(seed):
    chance = random.Random(seed)
    size = chance.randint(1, 6)
    one = batch(pending=size, unrun=size, failed=0, total=size)
    open_members = [(False, False)] * size
    fired = []
    while open_members:
        has_run, counts_failed = open_members.pop(chance.randrange(len(open_members)))
        to = chance.choice([GONE, State.RETRIES, State.DEAD, State.DISCARDED])
        counted = count(to, has_run=has_run, counts_failed=counts_failed, succeeded=to is GONE)
        one.pending += counted.pending
        one.unrun += counted.unrun
        one.failed += counted.failed
        one.is_broken |= counted.breaks
        if to in (State.RETRIES, State.DEAD):
            open_members.append((counted.has_run, counted.counts_failed))
        for step in advance(one):
            fired.append(step)
            if step is BatchStep.FIRE_COMPLETE:
                one.complete_st = CallbackProgress.FINISHED
        assert one.pending == len(open_members)
        assert one.unrun == sum(not has_run for has_run, _ in open_members)
        assert one.failed == sum(counts_failed for _, counts_failed in open_members)
    fired += advance(one)
    assert (one.pending, one.unrun, one.failed) == (0, 0, 0)
    assert fired.count(BatchStep.FIRE_COMPLETE) == 1
    assert fired.count(BatchStep.FIRE_SUCCESS) == (not one.is_broken)
    assert [str(kind) for kind in Kind] == ["complete", "success"]
