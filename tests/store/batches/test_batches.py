"""Batches in the store: counts follow their members, each callback runs once, batches nest, and none hangs."""

import threading
from datetime import timedelta

import pytest
from django.db import connection, connections
from django.db.models import F
from django.utils import timezone

from django_faktory.core.job_parser import parse_job
from django_faktory.core.json import jsontext
from django_faktory.core.lifecycle import State
from django_faktory.core.payloads import Ack, FetchRequest, NewBatch, failure
from django_faktory.errors import BatchClosed, UnknownBatch
from django_faktory.models import Batch, Job
from django_faktory.store.batches import batches
from django_faktory.store.jobs import acknowledgements, bulk, claims, failures, pushes, transitions
from django_faktory.store.maintenance import due
from django_faktory.store.store import Store
from tests.factories import payload
from tests.store import by_ids
from tests.store.limits.conftest import Node

pytestmark = pytest.mark.django_db(transaction=True)

_numbers = iter(range(10**9))


def job(jobtype="member", **custom):
    jid = f"job-{next(_numbers):08d}"
    members = ",".join(f'"{key}":"{value}"' for key, value in custom.items())
    return parse_job(f'{{"jid":"{jid}","jobtype":"{jobtype}","args":[],"custom":{{{members}}}}}')


def new(parent="", *, complete=True, success=True, caller_wid=""):
    made = NewBatch(
        parent_bid=parent,
        complete=job("complete", _cb="complete") if complete else None,
        success=job("success", _cb="success") if success else None,
    )
    return batches.new(Store(), made, caller_wid=caller_wid)


def push(bid, count=1):
    pushed = [job(bid=bid) for _ in range(count)]
    assert pushes.push(Store(), pushed) == [None] * count
    return pushed


def commit(bid):
    batches.commit(Store(), bid)


def fetch(count=100, wid="w"):
    [found] = claims.fetch(Store(), [FetchRequest(queues=("default",), wid=wid, count=count)])
    return found


def ack(*reservations):
    return acknowledgements.ack(Store(), [Ack(jid=one.jid, wid=one.wid, attempt=one.attempt) for one in reservations])


def fail(reservation, **more):
    failures.fail(Store(), [failure(jid=reservation.jid, wid=reservation.wid, errtype="E", message="m", **more)])


def waiting():
    """Return the jobtypes of waiting jobs, in order."""
    return list(Job.objects.filter(state="enqueued").order_by("enqueued_at", "id").values_list("jobtype", flat=True))


def status(bid):
    one = batches.status(Store(), bid)
    return one.total, one.pending, one.failed, one.complete_st, one.success_st


def test_complete_and_success_callbacks_run_in_turn_after_all_members_succeed():
    bid = new()
    push(bid, 3)
    commit(bid)
    taken = fetch()
    assert status(bid) == (3, 3, 0, "", "")
    assert ack(*taken[:2]) == [True, True]
    assert waiting() == []
    assert ack(taken[2]) == [True]
    assert status(bid) == (3, 0, 0, "1", "")
    assert waiting() == ["complete"]
    ack(*fetch())
    assert status(bid) == (3, 0, 0, "2", "1")
    assert waiting() == ["success"]
    ack(*fetch())
    assert status(bid) == (3, 0, 0, "2", "2")
    assert Batch.objects.get().is_over


def test_a_second_ack_of_a_member_is_not_counted():
    bid = new()
    push(bid, 2)
    commit(bid)
    one, two = fetch()
    assert ack(one, one) == [True, False]
    assert ack(one) == [False]
    assert status(bid) == (2, 1, 0, "", "")
    ack(two)
    assert waiting() == ["complete"]


def test_callbacks_of_an_empty_or_finished_batch_are_enqueued_at_commit():
    bid = new(complete=False)
    push(bid)
    ack(*fetch())
    assert waiting() == []
    commit(bid)
    assert waiting() == ["success"]
    commit(bid)
    assert waiting() == ["success"]
    commit(new(success=False))
    assert waiting() == ["success", "complete"]


def test_complete_fires_after_all_first_attempts_and_success_after_the_last_retry():
    bid = new()
    push(bid, 2)
    commit(bid)
    one, two = fetch()
    fail(one)
    assert status(bid) == (2, 2, 1, "", "")
    ack(two)
    assert status(bid) == (2, 1, 1, "1", "")
    ack(*fetch())
    assert status(bid) == (2, 1, 1, "2", "")
    by_ids.requeue([Job.objects.get(state="retries").pk], using="default")
    ack(*fetch())
    assert status(bid) == (2, 0, 0, "2", "1")
    assert waiting() == ["success"]


def test_a_dead_member_delays_success_until_a_manual_retry_succeeds():
    bid = new(complete=False)
    push(bid)
    commit(bid)
    fail(fetch()[0], verdict="kill")
    assert status(bid) == (1, 1, 1, "2", "")
    by_ids.requeue([Job.objects.get(state="dead").pk], using="default")
    ack(*fetch())
    assert waiting() == ["success"]


@pytest.mark.parametrize("way", ["discard", "kill then discard", "flushed queue", "expired", "dropped"])
def test_a_dropped_member_settles_its_batch_but_success_never_fires(way):
    bid = new()
    [member] = push(bid)
    commit(bid)
    row = Job.objects.get(jid=member.jid)
    if way == "kill then discard":
        by_ids.kill([row.pk], using="default")
        assert status(bid)[:2] == (1, 1)
    if way in ("discard", "kill then discard"):
        by_ids.discard([row.pk], using="default")
    elif way == "flushed queue":
        for step in bulk.remove_queues(Store(), ["default"]):
            step()
            break
    elif way == "expired":
        Job.objects.update(expires_at="2020-01-01T00:00:00Z")
        due.expire(Store())
    else:
        fail(fetch()[0], verdict="discard")
    assert status(bid) == (1, 0, 0, "1", "")
    ack(*fetch())
    assert status(bid) == (1, 0, 0, "2", "")
    assert waiting() == []
    assert Batch.objects.get().is_broken
    assert Batch.objects.get().is_over


def test_a_parents_success_waits_for_the_childs_success_callback():
    parent = new(complete=False)
    push(parent)
    child = new(parent, complete=False)
    push(child)
    commit(child)
    commit(parent)
    one, two = fetch()
    ack(one)
    assert waiting() == []
    ack(two)
    assert waiting() == ["success"]
    assert [status(bid)[4] for bid in (parent, child)] == ["", "1"]
    ack(*fetch())
    assert [status(bid)[4] for bid in (parent, child)] == ["1", "2"]
    ack(*fetch())
    assert [status(bid)[4] for bid in (parent, child)] == ["2", "2"]


def test_success_callbacks_of_nested_batches_run_from_leaf_to_root():
    bids = [new(complete=False)]
    for _ in range(5):
        bids.append(new(bids[-1], complete=False))
    for bid in bids:
        commit(bid)
    assert [status(bid)[4] for bid in bids] == ["", "", "", "", "", "1"]
    for _ in bids:
        [callback] = fetch()
        ack(callback)
    assert [status(bid)[4] for bid in bids] == ["2"] * 6


def test_after_commit_only_a_running_member_may_add_jobs():
    bid = new()
    push(bid)
    commit(bid)
    outsider = job(bid=bid)
    [refusal] = pushes.push(Store(), [outsider])
    assert isinstance(refusal, BatchClosed)
    assert bid in str(refusal)
    assert not Job.objects.filter(jid=outsider.jid).exists()
    [member] = fetch()
    batches.check_open(Store(), bid, caller_wid="w")
    with pytest.raises(BatchClosed, match="only one of its own jobs"):
        batches.reopen(Store(), bid, caller_wid="stranger")
    push(bid, 2)  # pushed by a connection without a wid, while a member runs
    ack(member)
    assert status(bid) == (3, 2, 0, "", "")
    ack(*fetch())
    with pytest.raises(BatchClosed, match="a callback of it was enqueued"):
        batches.reopen(Store(), bid, caller_wid="w")


def test_a_reopened_batch_counts_as_committed_after_its_reopen_deadline():
    bid = new(complete=False)
    push(bid)
    commit(bid)
    [member] = fetch()
    batches.reopen(Store(commit_within_s=1800), bid, caller_wid="w")
    ack(member)
    assert waiting() == []
    assert batches.expire(Store()) == 0
    Batch.objects.update(reopened_until=F("reopened_until") - timedelta(minutes=30))
    with pytest.raises(BatchClosed, match="only one of its own jobs"):
        batches.check_open(Store(), bid, caller_wid="w")
    assert batches.expire(Store()) == 1
    assert waiting() == ["success"]
    assert not Batch.objects.get().is_expired


def test_an_ack_after_the_reopen_deadline_settles_the_batch_without_maintenance():
    bid = new(complete=False)
    push(bid)
    commit(bid)
    [member] = fetch()
    batches.reopen(Store(), bid, caller_wid="w")
    Batch.objects.update(reopened_until="2020-01-01T00:00:00Z")
    ack(member)
    assert waiting() == ["success"]
    assert Batch.objects.get().reopened_until is None


def test_a_sweep_ignores_reopened_batches():
    bid = new()
    push(bid)
    commit(bid)
    [member] = fetch()
    batches.reopen(Store(), bid, caller_wid="w")
    ack(member)
    assert batches.sweep(Store()) == 0
    assert waiting() == []


def test_a_parent_waits_again_for_a_reopened_child():
    parent = new(success=False)
    child = new(parent, complete=False)
    push(child)
    keeps_parent_open = push(parent)
    commit(child)
    commit(parent)
    first, second = sorted(fetch(), key=lambda one: one.jid in {job.jid for job in keeps_parent_open})
    fail(first)  # executed: the parent no longer waits for its child
    assert Batch.objects.get(bid=parent).open_children == 0
    by_ids.requeue([Job.objects.get(jid=first.jid).pk], using="default")
    [again] = fetch()
    batches.reopen(Store(), child, caller_wid="w")
    assert Batch.objects.get(bid=parent).open_children == 1
    ack(second, again)
    assert waiting() == []
    commit(child)
    assert waiting() == ["success"]
    ack(*fetch())
    assert waiting() == ["complete"]


@pytest.mark.parametrize("verb", ["commit", "push", "open", "child"])
def test_a_batch_is_closed_at_its_deadline_even_before_maintenance_runs(verb):
    bid = new()
    push(bid)
    Batch.objects.update(expires_at="2020-01-01T00:00:00Z")
    if verb == "push":
        [refusal] = pushes.push(Store(), [job(bid=bid)])
        assert "expired" in str(refusal)
    else:
        ask = {"commit": commit, "open": lambda bid: batches.reopen(Store(), bid), "child": new}[verb]
        with pytest.raises(BatchClosed, match="it was not committed in time, and expired"):
            ask(bid)
    assert batches.expire(Store()) == 1
    assert (Batch.objects.count(), status(bid)[0]) == (1, 1)


class TestACallbackAddsToItsAncestors:
    def test_a_running_callback_may_add_to_every_ancestor_batch(self):
        root = new()
        middle = new(root)
        leaf = new(middle, complete=False)
        for bid in (leaf, middle, root):
            commit(bid)
        [callback] = fetch(wid="w")
        assert callback.jobtype == "success"
        for bid in (middle, root):
            batches.check_open(Store(), bid, caller_wid="w")
            batches.check_open(Store(), bid, caller_wid="")
            with pytest.raises(BatchClosed, match="only one of its own jobs"):
                batches.check_open(Store(), bid, caller_wid="stranger")
        step = new(root, caller_wid="w")
        commit(step)
        ack(callback)
        assert Batch.objects.get(bid=root).unsucceeded_children == 2

    def test_a_callback_may_not_add_to_its_own_or_unrelated_batches(self):
        parent, other = new(), new()
        child = new(parent, complete=False)
        push(other)
        for bid in (child, parent, other):
            commit(bid)
        assert [one.jobtype for one in fetch(1, wid="another")] == ["member"]
        assert [one.jobtype for one in fetch(1, wid="w")] == ["success"]
        with pytest.raises(BatchClosed, match="only one of its own jobs"):
            batches.check_open(Store(), other, caller_wid="w")
        with pytest.raises(BatchClosed):
            batches.check_open(Store(), child, caller_wid="w")

    def test_a_callback_payload_contains_the_parent_batch_id(self):
        parent = new()
        child = new(parent, complete=False)
        commit(child)
        [callback] = fetch()
        custom = jsontext.members(jsontext.members(callback.text)["custom"])
        assert custom == {"_cb": '"success"', "_bid": f'"{child}"', "_pbid": f'"{parent}"'}


def test_a_batch_that_is_sent_twice_is_stored_once():
    parent = new()
    made = NewBatch(bid=batches.new_bid(), parent_bid=parent, success=job("success"))
    assert [batches.new(Store(), made) for _ in range(2)] == [made.bid, made.bid]
    assert Batch.objects.count() == 2
    assert Batch.objects.get(bid=parent).children == 1


def test_a_withdrawn_batch_no_longer_keeps_its_parent_open():
    parent = new(complete=False)
    child = new(parent)
    commit(parent)
    batches.withdraw(Store(), [child])
    assert not Batch.objects.filter(bid=child)
    assert waiting() == ["success"]
    batches.withdraw(Store(), [child, parent])
    assert Batch.objects.get().bid == parent, "it was committed"


def test_a_batch_with_a_member_or_a_child_is_not_withdrawn():
    parent, other = new(), new()
    push(new(parent))
    push(other)
    for bid in (parent, other):
        batches.withdraw(Store(), [bid])
        assert Batch.objects.filter(bid=bid)


def test_an_unknown_batch_id_is_named_in_the_error():
    [refusal] = pushes.push(Store(), [job(bid="b-nothere")])
    assert isinstance(refusal, UnknownBatch)
    for verb in (batches.commit, batches.status, batches.reopen):
        with pytest.raises(UnknownBatch, match="no such batch b-nothere"):
            verb(Store(), "b-nothere")
    with pytest.raises(UnknownBatch):
        new("b-nothere")


def test_an_uncommitted_batch_expires_and_no_longer_blocks_its_parent():
    parent = new()
    child = new(parent)
    push(child)
    commit(parent)
    Batch.objects.filter(bid=child).update(expires_at="2020-01-01T00:00:00Z")
    assert batches.expire(Store()) == 1
    assert waiting() == ["member", "complete"]
    ack(*fetch())
    assert status(parent) == (0, 0, 0, "2", "")
    with pytest.raises(BatchClosed, match="expired"):
        commit(child)


def test_the_sweep_repairs_only_batches_that_were_changed_manually():
    bid = new()
    push(bid)
    commit(bid)
    assert batches.sweep(Store()) == 0
    Job.objects.all().delete()
    Batch.objects.update(pending=0, unrun=0)
    assert batches.sweep(Store()) == 1
    assert waiting() == ["complete"]


def test_a_push_of_the_jid_of_a_dead_member_changes_nothing():
    bid = new()
    [member] = push(bid)
    commit(bid)
    fail(fetch()[0], verdict="kill")
    assert pushes.push(Store(), [parse_job(f'{{"jid":"{member.jid}","jobtype":"other","args":[]}}')]) == [None]
    assert Job.objects.get(jid=member.jid).state == State.DEAD
    assert connection.vendor


def test_callbacks_that_share_a_jid_are_tracked_separately():
    shared = job("callback")
    bid = batches.new(Store(), NewBatch(complete=shared, success=shared))
    commit(bid)
    ack(*fetch())
    assert status(bid)[3:] == ("2", "1")
    ack(*fetch())
    assert status(bid)[3:] == ("2", "2")
    assert Batch.objects.get().is_over


def test_a_callback_gets_a_new_jid_if_a_dead_member_has_it():
    other = new(success=False)
    [dead] = push(other)
    fail(fetch()[0], verdict="kill")
    callback = parse_job(f'{{"jid":"{dead.jid}","jobtype":"mine","args":[]}}')
    bid = batches.new(Store(), NewBatch(success=callback))
    commit(bid)
    [mine] = fetch()
    assert mine.jid != dead.jid
    ack(mine)
    assert status(bid)[4] == "2"
    assert Job.objects.get(jid=dead.jid).state == State.DEAD


def test_a_retried_member_may_add_jobs_if_there_is_no_complete_callback():
    bid = new(complete=False)
    push(bid)
    commit(bid)
    fail(fetch()[0], retry_in_s=0)
    assert status(bid) == (1, 1, 1, "2", "")
    by_ids.requeue([Job.objects.get().pk], using="default")
    [again] = fetch()
    push(bid)
    assert status(bid) == (2, 2, 1, "", ""), "it has a job that was not executed again"
    ack(again, *fetch())
    assert waiting() == ["success"]


def test_a_late_member_reopens_its_parents_unless_they_were_notified():
    bids = [new(complete=False)]
    bids += [new(bids[-1], complete=False)]
    bids += [new(bids[-1], complete=False)]
    push(bids[2])
    for bid in bids:
        commit(bid)
    fail(fetch()[0], retry_in_s=0)
    assert [status(bid)[3] for bid in bids] == ["2", "2", "2"], "all of it was executed"
    by_ids.requeue([Job.objects.get().pk], using="default")
    [again] = fetch()
    push(bids[2])
    assert [status(bid)[3] for bid in bids] == ["", "", ""]
    ack(again, *fetch())
    for _ in bids:
        ack(*fetch())
    assert [status(bid)[3:] for bid in bids] == [("2", "2")] * 3
    assert batches.sweep(Store()) == 0


def test_a_child_batch_is_closed_once_a_parent_callback_was_enqueued():
    parent = new(success=False)
    child = new(parent, complete=False)
    push(child)
    commit(child)
    commit(parent)
    fail(fetch()[0], retry_in_s=0)
    assert waiting() == ["complete"]
    by_ids.requeue([Job.objects.get(state="retries").pk], using="default")
    fetch()
    [refusal] = pushes.push(Store(), [job(bid=child)])
    assert isinstance(refusal, BatchClosed)
    assert str(refusal).startswith(f"batch {child}: a callback of its parent {parent} was enqueued already")
    assert status(child)[3] == "2"


def test_a_cancelled_member_of_a_lost_worker_is_counted_once():
    bid = new()
    push(bid, 2)
    commit(bid)
    taken = fetch(1)
    Job.objects.filter(jid=taken[0].jid).update(losses=2)
    transitions.cancel(Store(), [taken[0].jid])
    failures.reclaim_lost(Store(), ["w"])
    assert status(bid) == (2, 1, 0, "", "")
    assert Batch.objects.get().unrun == 1


def test_a_batch_created_during_a_flush_keeps_its_members():
    push(new(), 2)
    steps = bulk.flush(Store())
    next(steps)()
    bid = new()
    push(bid, 2)
    for step in steps:
        step()
    assert status(bid) == (2, 2, 0, "", "")
    assert Job.objects.filter(bid=bid).count() == Job.objects.count() == 2
    assert Batch.objects.count() == 1


def test_members_that_fail_during_a_concurrent_discard_settle_their_batch():
    """A job that changed since the look is left alone: dropped then, it would never settle its batch."""
    bid = new(complete=False)
    push(bid, 20)
    commit(bid)
    taken, pks = fetch(20), list(Job.objects.values_list("pk", flat=True))
    over, errors = threading.Event(), []

    def drop():
        try:
            while not over.is_set():
                by_ids.discard(pks, using="default")
        except Exception as error:  # noqa: BLE001 (handed to the test)
            errors.append(error)
        finally:
            connections.close_all()

    dropping = threading.Thread(target=drop)
    dropping.start()
    for member in taken:
        fail(member, retry_in_s=60)
    over.set()
    dropping.join(60)
    by_ids.discard(pks, using="default")
    assert errors == []
    assert not Job.objects.exists()
    assert status(bid) == (20, 0, 0, "2", "")


def test_a_batch_that_completes_without_a_callback_below_an_expired_one_says_so():
    node = Node()
    parent = batches.new(Store(), NewBatch(success=payload()))
    child = batches.new(Store(), NewBatch(parent_bid=parent, success=payload("success1")))
    node.push("a", custom={"bid": child})
    batches.commit(Store(), child)
    assert node.fetch() == ["a"]
    node.fail("a")
    Batch.objects.filter(bid=parent).update(expires_at=timezone.now() - timedelta(seconds=1))
    assert batches.expire(Store()) == 1
    Job.objects.update(state="enqueued", enqueued_at=timezone.now(), run_at=None)
    assert node.fetch() == ["a"]
    node.push("b", custom={"bid": child, "_wid": "w1"})
    assert node.fetch() == ["b"]
    node.fail("b")
    assert batches.status(Store(), child).complete_st == "2"
    assert batches.sweep(Store()) == 0
