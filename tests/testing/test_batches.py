"""Test `with Batch(…)` in a project's tests: drained, inlined, run at once, or only recorded."""

from datetime import timedelta

import pytest
from django.db import transaction
from django.test import SimpleTestCase, TestCase

from django_faktory import Batch, BatchClosed, Discard, UnknownBatch, task
from django_faktory.brokers import get_broker
from django_faktory.core.payloads import NewBatch
from django_faktory.testing import drain, enqueued_jobs, inline, made_batches
from tests.project.models import Mark

DUMMY, IMMEDIATE = "DummyBackend", "ImmediateBackend"
BOTH = pytest.mark.parametrize("name", [DUMMY, IMMEDIATE])
ran = []


@pytest.fixture(autouse=True)
def nothing_ran():
    ran.clear()


@task
def note(what):
    ran.append(what)


@task(max_attempts=2)
def fail_for_good():
    raise ValueError("no luck")


@task
def drop():
    raise Discard("not needed")


@task
def enqueue_another():
    note.enqueue("another")


@task(takes_context=True)
def grow(context, what):
    ran.append(what)
    with context.batch:
        note.enqueue(f"added by {what}")
        with Batch(success=note.callback(f"after the child of {what}")):
            note.enqueue(f"in the child of {what}")


@task(takes_context=True)
def next_step(context, steps):
    ran.append(f"{steps} steps to come")
    if steps:
        with context.batch.parent, Batch(success=next_step.callback(steps - 1)):
            note.enqueue(f"step {steps}")


@task(takes_context=True)
def add_too_late(context):
    try:
        with context.batch:
            note.enqueue("never")
    except BatchClosed as error:
        ran.append(str(error))


@task(takes_context=True)
def note_total(context):
    ran.append(context.batch.status().total)


def workflow():
    """Enqueue three nested batches, each with one job."""
    with Batch(description="A", success=note.callback("A"), complete=note.callback("all executed")) as batch:
        note.enqueue(1)
        with Batch(description="B", success=note.callback("B")):
            note.enqueue(2)
            with Batch(description="C", success=note.callback("C")):
                note.enqueue(3)
    return batch


IN_ORDER = [1, 2, 3, "C", "B", "all executed", "A"]

# --- drain and inline


@pytest.mark.django_db
def test_drain_runs_members_and_then_callbacks_of_the_innermost_batch_first():
    batch = workflow()
    assert [one.state for one in drain()] == ["succeeded"] * 7
    assert ran == IN_ORDER
    assert batch.status().success_st == "2"


@pytest.mark.django_db(transaction=True)
def test_inline_runs_a_batch_when_its_block_commits():
    with inline():
        with Batch(success=note.callback("success")):
            note.enqueue(1)
            assert ran == []
        assert ran == [1, "success"]


class InlineTest(TestCase):
    def test_in_a_testcase_a_batch_runs_when_inline_ends(self):
        with inline():
            workflow()
        assert ran == IN_ORDER

    def test_in_a_testcase_inline_runs_the_callback_of_an_empty_batch(self):
        with inline(), Batch(success=note.callback("success")):
            pass
        assert ran == ["success"]


@pytest.mark.django_db(transaction=True)
def test_inline_runs_the_callback_of_an_empty_batch_at_commit():
    with inline():
        with Batch(success=note.callback("success")):
            pass
        assert ran == ["success"]


@pytest.mark.django_db
def test_an_uncommitted_batch_expires_while_time_is_drained():
    callback = note.get_backend().callback_job(note, ["parent's"], {})
    parent = get_broker().new_batch(NewBatch(complete=callback))
    child = get_broker().new_batch(NewBatch(complete=callback, parent_bid=parent))
    get_broker().commit_batch(parent)
    drain(until=timedelta(minutes=29))
    assert ran == []
    drain(until=timedelta(minutes=31))
    assert ran == ["parent's"]
    with pytest.raises(BatchClosed, match=child):
        get_broker().commit_batch(child)


@pytest.mark.django_db
def test_jobs_enqueued_by_a_drained_job_do_not_join_the_open_batch():
    enqueue_another.enqueue()
    with Batch(success=note.callback("success")) as batch:
        drain()
        assert batch.status().total == 0


# --- ImmediateBackend


def test_immediate_members_run_in_the_block_and_callbacks_after_it(tasks_setting):
    tasks_setting(IMMEDIATE)
    with Batch(success=note.callback("success"), complete=note.callback("complete")) as batch:
        note.enqueue_many([(1,), (2,)])
        assert ran == [1, 2]
    assert ran == [1, 2, "complete", "success"]
    status = batch.status()
    assert (status.total, status.pending, status.complete_st, status.success_st) == (2, 0, "2", "2")


def test_immediate_callbacks_of_the_innermost_batch_run_first(tasks_setting):
    tasks_setting(IMMEDIATE)
    workflow()
    assert ran == IN_ORDER


def test_immediate_empty_batch_runs_its_callback(tasks_setting):
    tasks_setting(IMMEDIATE)
    with Batch(success=note.callback("success")):
        pass
    assert ran == ["success"]


def test_immediate_running_job_can_add_to_its_own_batch(tasks_setting):
    tasks_setting(IMMEDIATE)
    with Batch(success=note.callback("success")) as batch:
        grow.enqueue("a")
    assert ran == ["a", "added by a", "in the child of a", "after the child of a", "success"]
    assert batch.status().total == 2


def test_immediate_callback_can_add_the_next_step_to_the_parent_batch(tasks_setting):
    tasks_setting(IMMEDIATE)
    with Batch(success=note.callback("done")), Batch(success=next_step.callback(1)) as first:
        note.enqueue("first")
    assert ran == ["first", "1 steps to come", "step 1", "0 steps to come", "done"]
    assert Batch.find(first.bid).parent.parent is None


def test_immediate_jobs_enqueued_by_a_member_do_not_join_its_batch(tasks_setting):
    tasks_setting(IMMEDIATE)
    with Batch(success=note.callback("success")) as batch:
        enqueue_another.enqueue()
    assert batch.status().total == 1


def test_immediate_callback_can_read_its_batch_but_not_add_to_it(tasks_setting):
    tasks_setting(IMMEDIATE)
    with Batch(complete=note_total, success=add_too_late) as batch:
        note.enqueue(1)
    assert ran == [1, 1, f"batch {batch.bid}: a callback of it was enqueued already, nothing can be added any more"]


def test_immediate_batch_with_a_dead_member_completes_but_never_succeeds(tasks_setting):
    tasks_setting(IMMEDIATE)
    with Batch(success=note.callback("success"), complete=note.callback("complete")) as batch:
        fail_for_good.enqueue()
    assert ran == ["complete"]
    status = batch.status()
    assert (status.pending, status.failed, status.is_broken) == (1, 1, False)


def test_immediate_discarded_member_breaks_its_batch_and_the_parent(tasks_setting):
    tasks_setting(IMMEDIATE)
    with (
        Batch(success=note.callback("success"), complete=note.callback("complete")) as parent,
        Batch(success=note.callback("child's")) as child,
    ):
        drop.enqueue()
    assert ran == ["complete"]
    assert (child.status().is_broken, parent.status().is_broken) == (True, True)


@pytest.mark.parametrize(("callback", "is_broken"), [(fail_for_good, False), (drop, True)])
def test_immediate_dead_callback_blocks_the_success_of_its_batch_and_parent(tasks_setting, callback, is_broken):
    tasks_setting(IMMEDIATE)
    with (
        Batch(success=note.callback("success"), complete=note.callback("parent's")) as parent,
        Batch(complete=callback, success=note.callback("child's")) as child,
    ):
        note.enqueue(1)
    assert ran == [1, "parent's"]
    assert (child.status().complete_st, child.status().is_broken) == ("1", is_broken)
    assert (parent.status().success_st, parent.status().is_broken) == ("", is_broken)


def test_immediate_scheduled_member_delays_the_callbacks(tasks_setting):
    tasks_setting(IMMEDIATE)
    with Batch(complete=note.callback("complete")) as batch:
        note.using(run_after=timedelta(hours=1)).enqueue(1)
    assert ran == []
    assert batch.status().pending == 1


@pytest.mark.django_db
def test_immediate_exception_rolls_back_batch_and_rows_without_callbacks(tasks_setting):
    tasks_setting(IMMEDIATE)
    batch = Batch(success=note.callback("success"))

    def half_way():
        with batch:
            Mark.objects.create(text="half")
            with Batch(success=note.callback("child's")):
                note.enqueue(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half_way()
    assert ran == [1]
    assert not Mark.objects.exists()
    with pytest.raises(UnknownBatch, match=batch.bid):
        batch.status()


@pytest.mark.django_db
def test_immediate_callbacks_run_after_the_transaction_of_the_block(tasks_setting):
    tasks_setting(IMMEDIATE)
    with Batch(success=note_transaction_depth):
        pass
    with transaction.atomic(), Batch(success=note_transaction_depth):
        pass
    assert ran[1] - ran[0] == 1, "the block's own transaction has ended; the caller's has not"


@task
def note_transaction_depth():
    ran.append(len(transaction.get_connection().savepoint_ids))


# --- DummyBackend


def test_dummy_batch_records_its_jobs_as_results_and_runs_nothing(tasks_setting):
    backend = tasks_setting(DUMMY)
    batch = workflow()
    assert ran == []
    assert [result.args for result in backend.results] == [[1], [2], [3]]
    assert [result.args for result in backend.results if backend.bid_of(result) == batch.bid] == [[1]]
    status = batch.status()
    assert (status.total, status.pending, status.complete_st) == (1, 1, "")


def test_dummy_empty_batch_enqueues_its_callback(tasks_setting):
    backend = tasks_setting(DUMMY)
    with Batch(success=note.using(queue_name="mail").callback("success")):
        pass
    [result] = backend.results
    assert (result.task.jobtype, result.args, result.task.queue_name) == (note.jobtype, ["success"], "mail")


def test_dummy_exception_removes_only_the_batch_and_its_jobs(tasks_setting):
    backend = tasks_setting(DUMMY)
    note.enqueue("before")

    def half_way():
        with Batch(success=note.callback("end")):
            note.enqueue("in it")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half_way()
    assert [result.args for result in backend.results] == [["before"]]
    assert made_batches() == []


def test_clearing_the_dummy_backend_also_removes_batches(tasks_setting):
    backend = tasks_setting(DUMMY)
    batch = workflow()
    backend.clear()
    with pytest.raises(UnknownBatch, match=batch.bid):
        Batch.find(batch.bid)


# --- all backends


@BOTH
def test_both_test_backends_reject_outside_additions_after_commit(tasks_setting, name):
    tasks_setting(name)
    with Batch(success=note.callback("end")) as batch:
        note.using(run_after=timedelta(hours=1)).enqueue(1)
    with pytest.raises(BatchClosed, match=f"{batch.bid}: it is committed"), Batch.find(batch.bid):
        pass


@BOTH
def test_both_test_backends_reject_a_job_of_an_unknown_batch(tasks_setting, name):
    backend = tasks_setting(name)
    with Batch(success=note.callback("success")) as batch:
        gone = backend.batches.by_bid.pop(batch.bid)
        with pytest.raises(UnknownBatch, match=batch.bid):
            note.enqueue("never")
        backend.batches.by_bid[batch.bid] = gone
    assert batch.status().total == 0
    assert "never" not in ran


class WithoutDatabaseTest(SimpleTestCase):
    def test_batches_of_the_test_backends_need_no_database(self):
        for name in (DUMMY, IMMEDIATE):
            path = f"django_faktory.testing.backends.{name}"
            with self.settings(TASKS={"default": {"BACKEND": path, "QUEUES": []}}):
                assert workflow().status().total == 1


def summary(batches):
    return [
        (
            one.description,
            one.success and one.success.args,
            one.complete and one.complete.args,
            [j.args for j in one.jobs],
        )
        for one in batches
    ]


@pytest.mark.django_db
@pytest.mark.parametrize("name", [DUMMY, None])
def test_made_batches_lists_batches_with_their_jobs_and_callbacks(tasks_setting, name):
    if name:
        tasks_setting(name)
    batch = workflow()
    made = made_batches()
    assert summary(made) == [
        ("A", ["A"], ["all executed"], [[1]]),
        ("B", ["B"], None, [[2]]),
        ("C", ["C"], None, [[3]]),
    ]
    assert [one.parent_bid for one in made] == ["", made[0].bid, made[1].bid]
    assert made[0].bid == batch.bid
    assert {job.bid for job in enqueued_jobs()} == {one.bid for one in made}


def test_made_batches_have_no_jobs_left_with_the_immediate_backend(tasks_setting):
    tasks_setting(IMMEDIATE)
    workflow()
    assert [one.jobs for one in made_batches()] == [[], [], []]
