"""`with Batch(…)`: jobs enqueued inside join it, nested batches are children, and all are stored in one transaction."""

import pytest
from django.db import transaction

from django_faktory import Batch, task
from django_faktory.models import Batch as Row
from django_faktory.models import Job
from django_faktory.testing import drain

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]
ran = []


@pytest.fixture(autouse=True)
def nothing_ran():
    ran.clear()


@task
def note(what):
    ran.append(what)


@task(takes_context=True)
def grow(context, what, times):
    ran.append(what)
    if times:
        with context.batch:
            grow.enqueue(f"{what}+", times - 1)
            with Batch(success=note.callback(f"child of {what}")):
                note.enqueue(f"in child of {what}")


@task(takes_context=True)
def next_step(context, steps):
    """Callback of a step: adds the next step to the batch that is the parent of all steps."""
    ran.append(f"step with {steps} to come")
    if steps:
        with context.batch.parent, Batch(success=next_step.callback(steps - 1)):
            note.enqueue(f"job of step {steps}")


def test_a_callback_adds_the_next_step_to_the_parent_of_its_batch():
    with Batch(success=note.callback("done")) as whole, Batch(success=next_step.callback(2)) as first:
        note.enqueue("first")
    assert Batch.find(whole.bid).parent is None
    assert Batch.find(first.bid).parent.bid == whole.bid
    drain()
    steps = ["step with 2 to come", "job of step 2", "step with 1 to come", "job of step 1", "step with 0 to come"]
    assert ran == ["first", *steps, "done"]


@task
def note_batch(what):
    batch = Batch.of_this_job()
    ran.append((what, batch and batch.bid, batch and batch.status().failed))


@task
async def note_batch_async(what):
    batch = Batch.of_this_job()
    ran.append((what, batch and batch.bid))


def test_members_and_callbacks_know_their_batch_without_the_context():
    with Batch(success=note_batch.callback("callback"), complete=note_batch_async.callback("first")) as batch:
        note_batch.enqueue("member")
    drain()
    note_batch.enqueue("other")
    drain()
    assert ran == [("member", batch.bid, 0), ("first", batch.bid), ("callback", batch.bid, 0), ("other", None, None)]
    assert Batch.of_this_job() is None


def test_a_running_task_adds_jobs_and_children_to_its_own_batch():
    with Batch(success=note.callback("end")):
        grow.enqueue("a", 2)
    drain()
    assert ran[-1] == "end"
    assert sorted(ran[:-1]) == sorted(
        ["a", "a+", "a++", "in child of a", "in child of a+", "child of a", "child of a+"]
    )


def test_an_exception_in_the_block_stores_neither_batch_nor_jobs():
    def half_way():
        with Batch(success=note.callback("never")):
            note.enqueue(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half_way()
    assert not Row.objects.exists()
    assert not Job.objects.exists()


def test_a_batch_is_rolled_back_with_the_callers_transaction():
    with transaction.atomic():
        with Batch(complete=note.callback("c")):
            note.enqueue(1)
        transaction.set_rollback(True)
    assert not Row.objects.exists()
    assert drain() is not None
    assert ran == []
