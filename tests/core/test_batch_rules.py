"""The rules of a batch, without a database: what counts, which callback follows, for any order of events."""

import random
from types import SimpleNamespace

import pytest

from django_faktory.core.batch_rules import BatchStep, CallbackProgress, Kind, advance, count
from django_faktory.core.lifecycle import GONE, State


def batch(**changes):
    """Return a committed batch with both callbacks and no members."""
    plain = {
        "is_committed": True, "is_reopened": False, "is_expired": False, "pending": 0, "unrun": 0, "open_children": 0,
        "unsucceeded_children": 0, "is_broken": False, "has_complete": True, "has_success": True, "complete_st": "",
        "success_st": "", "complete_failed": False, "success_failed": False, "reported_broken": False,
        "reported_complete": False, "reported_success": False, "is_over": False,
    }  # fmt: skip
    return SimpleNamespace(**plain | changes)


def test_nothing_happens_before_commit():
    assert advance(batch(is_committed=False)) == []


def test_nothing_happens_while_a_committed_batch_is_open_again():
    one = batch(is_reopened=True)
    assert advance(one) == []
    one.is_reopened = False
    assert advance(one) == [BatchStep.FIRE_COMPLETE]


def test_complete_waits_for_the_last_run_and_for_open_children():
    assert advance(batch(unrun=1, pending=1)) == []
    assert advance(batch(open_children=1, unsucceeded_children=1)) == []
    assert advance(batch(pending=1)) == [BatchStep.FIRE_COMPLETE]


def test_success_waits_for_completes_end():
    one = batch()
    assert advance(one) == [BatchStep.FIRE_COMPLETE]
    assert advance(one) == []
    one.complete_st = CallbackProgress.FINISHED
    assert advance(one) == [BatchStep.FIRE_SUCCESS]
    one.success_st = CallbackProgress.FINISHED
    assert advance(one) == [BatchStep.CLOSE_IN_PARENT, BatchStep.SUCCEED_IN_PARENT, BatchStep.END]


def test_what_has_no_callbacks_of_a_kind_goes_on_at_once():
    assert advance(batch(has_complete=False)) == [BatchStep.FIRE_SUCCESS]
    one = batch(has_success=False, complete_st=CallbackProgress.FINISHED)
    assert advance(one) == [BatchStep.CLOSE_IN_PARENT, BatchStep.SUCCEED_IN_PARENT, BatchStep.END]


@pytest.mark.parametrize("reason", [{"pending": 1}, {"unsucceeded_children": 1}])
def test_a_parent_goes_on_while_success_is_still_open(reason):
    assert advance(batch(complete_st=CallbackProgress.FINISHED, **reason)) == [BatchStep.CLOSE_IN_PARENT]


def test_a_broken_batch_tells_its_parent_and_ends():
    one = batch(complete_st=CallbackProgress.FINISHED, is_broken=True)
    assert advance(one) == [BatchStep.MARK_PARENT_BROKEN, BatchStep.CLOSE_IN_PARENT, BatchStep.END]


def test_a_callback_that_is_given_up_holds_up_no_parent():
    one = batch(complete_st=CallbackProgress.ENQUEUED, complete_failed=True)
    assert advance(one) == [BatchStep.CLOSE_IN_PARENT]
    one.complete_st = CallbackProgress.FINISHED
    assert advance(one) == [BatchStep.FIRE_SUCCESS], "retried by hand, it goes on"


def test_an_expired_batch_lets_its_parent_go_on_and_fires_nothing():
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
def test_each_end_counts_once(to, succeeded, added):
    counted = count(to, has_run=False, counts_failed=False, succeeded=succeeded)
    assert counted[:4] == added


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_to_members_the_counters_stay_true(seed):
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
