"""Refused operations on batches: the exception names the batch and the rule, and nothing is stored."""

from datetime import timedelta

import pytest

from django_faktory import Batch, BatchClosed, UnknownBatch, task
from django_faktory.brokers import get_broker
from django_faktory.core.payloads import NewBatch
from django_faktory.models import Batch as Row
from django_faktory.models import Job
from django_faktory.tasks.compat import InvalidTask
from django_faktory.testing import drain

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]
messages = []


@pytest.fixture(autouse=True)
def clear_messages():
    messages.clear()


@task
def note(what=None): ...


@task(unique_for=60)
def alone(): ...


@task(takes_context=True)
def add_a_job(context):
    refused(context.batch, note.enqueue)


@task(takes_context=True)
def add_a_child(context):
    refused(context.batch, lambda: Batch(success=note).__enter__())


@task(takes_context=True)
def add_a_job_again(context):
    if context.attempt == 1:
        raise ValueError("the second attempt comes when complete was enqueued")
    refused(context.batch, note.enqueue)


@task(takes_context=True)
async def add_as_a_coroutine(context):
    async with context.batch:
        await note.aenqueue("added")


def refused(batch, add):
    before = Row.objects.count(), Job.objects.count()
    with pytest.raises(BatchClosed) as error, batch:
        add()
    messages.append(str(error.value).replace(batch.bid, "BID"))
    assert (Row.objects.count(), Job.objects.count()) == before


def finished():
    with Batch(success=note) as batch:
        note.enqueue()
    drain()
    return batch


ENQUEUED = "batch BID: a callback of it was enqueued already, nothing can be added any more"
COMMITTED = "batch BID: it is committed, so only one of its own jobs, while it runs, can add to it"


def test_a_batch_without_callbacks_is_refused():
    with pytest.raises(TypeError, match=r"Batch: expected success=… or complete=…, or both: a task, or task\.callback"):
        Batch(description="nothing to do")
    assert not Row.objects.exists()


@pytest.mark.parametrize("wrong", ["shop.tasks.publish", 5, lambda: None])
def test_a_callback_that_is_not_a_task_is_refused(wrong):
    with pytest.raises(TypeError, match=r"Batch: expected a task, or task\.callback\(…\), as callback, got "):
        Batch(success=wrong)


def test_a_unique_task_is_refused_as_a_callback():
    with pytest.raises(InvalidTask, match="alone: unique_for: expected none for a callback"):
        Batch(success=alone)


def test_a_callback_with_run_after_is_refused():
    with pytest.raises(InvalidTask, match="note: run_after: expected none for a callback"):
        Batch(complete=note.using(run_after=timedelta(minutes=1)).callback())


def test_a_callback_with_unsupported_arguments_is_refused():
    with pytest.raises(TypeError, match="object"):
        Batch(success=note.callback(object()))
    assert not Row.objects.exists()


def test_enqueueing_into_a_batch_deleted_in_its_block_is_refused():
    batch = Batch(success=note)

    def half_way():
        with batch:
            Row.objects.all().delete()
            note.enqueue()

    with pytest.raises(UnknownBatch) as error:
        half_way()
    assert str(error.value) == f"no such batch {batch.bid}"
    assert not Job.objects.exists()


def test_a_committed_batch_refuses_jobs_from_outside():
    with Batch(success=note) as batch:
        note.enqueue()
    for add in (note.enqueue, lambda: Batch(success=note).__enter__()):
        refused(Batch.find(batch.bid), add)
    assert messages == [COMMITTED, COMMITTED]
    assert batch.status().total == 1


def test_a_batch_block_can_be_entered_only_once():
    with Batch(success=note) as batch:
        note.enqueue()
    refused(batch, note.enqueue)
    assert messages == ["batch BID: it was entered before; add jobs to it from its own jobs, with context.batch"]


def test_a_batch_cannot_be_its_own_child():
    def within_itself():
        with Batch(success=note) as batch, batch:
            pass

    with pytest.raises(BatchClosed, match=r"batch b-\w+: it was entered before"):
        within_itself()
    assert not Row.objects.exists()


@pytest.mark.parametrize("late", [add_a_job, add_a_child])
def test_a_callback_cannot_add_to_its_batch(late):
    with Batch(success=late):
        pass
    drain()
    assert messages == [ENQUEUED]


def test_a_retry_after_the_complete_callback_cannot_add_to_the_batch():
    with Batch(complete=note, success=note) as batch:
        add_a_job_again.enqueue()
    drain(until=timedelta(hours=1))
    assert messages == [ENQUEUED]
    assert batch.status().total == 1


def test_a_finished_batch_cannot_become_a_parent():
    batch = finished()
    refused(Batch.find(batch.bid), lambda: Batch(success=note).__enter__())
    assert messages == [ENQUEUED]
    callback = note.get_backend().callback_job(note, [], {})
    with pytest.raises(BatchClosed, match=f"batch {batch.bid}: a callback of it was enqueued already"):
        get_broker().new_batch(NewBatch(success=callback, parent_bid=batch.bid))
    assert Row.objects.count() == 1


def test_nested_blocks_of_one_batch_do_not_capture_later_jobs():
    with Batch(success=note) as batch:
        found = Batch.find(batch.bid)
        with found, found:
            note.enqueue("in")
        note.enqueue("in too")
    note.enqueue("out")
    assert batch.status().total == 2


def test_a_coroutine_task_can_add_to_its_batch():
    with Batch(success=note) as batch:
        add_as_a_coroutine.enqueue()
    assert [one.state for one in drain()] == ["succeeded"] * 3
    assert batch.status().total == 2
