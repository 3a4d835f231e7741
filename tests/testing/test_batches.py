"""Test `with Batch(…)` in a project's tests: drained, inlined, run at once, or only recorded."""

from datetime import timedelta

import pytest
from django.test import TestCase

from django_faktory import Batch, BatchClosed, task
from django_faktory.brokers import get_broker
from django_faktory.core.payloads import NewBatch
from django_faktory.testing import drain, enqueued_jobs, inline, made_batches

pytestmark = pytest.mark.once_if_quick

ran = []


@pytest.fixture(autouse=True)
def nothing_ran():
    ran.clear()


@task
def note(what):
    ran.append(what)


@task
def enqueue_another():
    note.enqueue("another")


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


@pytest.mark.parametrize("name", ["DummyBackend", "ImmediateBackend"])
def test_backends_for_tests_refuse_batches(tasks_setting, name):
    tasks_setting(name)
    with pytest.raises(TypeError, match=r"store no batches: use FaktoryBackend, a database and drain"):
        Batch(success=note.callback("success"))


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
def test_made_batches_lists_batches_with_their_jobs_and_callbacks():
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
