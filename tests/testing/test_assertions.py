"""Test assertions on waiting jobs, and the messages when they fail."""

from datetime import timedelta

import pytest
from django.test import override_settings

from django_faktory import FaktoryError
from django_faktory.testing import assert_enqueued, assert_enqueues, drain, enqueued_jobs
from tests.project import tasks

pytestmark = pytest.mark.once_if_quick


@pytest.mark.django_db
def test_enqueued_jobs_returns_all_waiting_jobs_oldest_first():
    tasks.add.enqueue(1, b=2)
    tasks.noop.using(run_after=timedelta(hours=1), priority=9).enqueue()
    tasks.fails.enqueue()
    tasks.returns.enqueue(1)
    drain()
    tasks.send_invoice.enqueue(42)
    waiting = enqueued_jobs()
    assert [job.jobtype for job in waiting] == [tasks.noop.jobtype, tasks.fails.jobtype, tasks.send_invoice.jobtype]
    assert [job.run_at is None for job in waiting] == [False, False, True]
    assert (waiting[0].priority, waiting[2].args, waiting[2].queue) == (9, [42], "mail")


@pytest.mark.django_db
def test_enqueued_jobs_filters_by_task_and_queue():
    tasks.noop.enqueue()
    tasks.noop.using(queue_name="low").enqueue()
    tasks.charge.enqueue(5)
    assert len(enqueued_jobs(tasks.noop)) == 2
    assert len(enqueued_jobs(queue="low")) == 1
    assert enqueued_jobs(tasks.charge, queue="low") == []
    assert enqueued_jobs(tasks.charge)[0].jobtype == "billing.charge"


@pytest.mark.django_db
def test_assert_enqueued_compares_arguments_after_json_conversion():
    tasks.echo.enqueue((1, 2), key={"a": (3,)})
    [job] = assert_enqueued(tasks.echo, args=[(1, 2)], kwargs={"key": {"a": [3]}})
    assert job.args == [[1, 2]]
    assert_enqueued(tasks.echo)
    assert_enqueued(tasks.echo, args=[[1, 2]], count=1, queue="default")
    assert_enqueued(tasks.echo, args=[1], count=0)


@pytest.mark.django_db
@pytest.mark.parametrize(
    "wanted",
    [{"args": []}, {"kwargs": {"key": 1}}, {"count": 2}, {"count": 0}, {"queue": "mail"}, {"args": (1,), "count": 2}],
)
def test_assert_enqueued_failure_lists_the_waiting_jobs(wanted):
    tasks.returns.enqueue(1)
    with pytest.raises(AssertionError, match=r"of tests\.project\.tasks\.returns.*\n.*args=\[1\]"):
        assert_enqueued(tasks.returns, **wanted)


@pytest.mark.django_db
def test_assert_enqueued_failure_reports_that_no_job_waits():
    with pytest.raises(AssertionError, match=r"at least one job of billing\.charge, got 0; waiting jobs: nothing"):
        assert_enqueued(tasks.charge)


@pytest.mark.django_db
def test_assert_enqueues_counts_only_jobs_enqueued_in_its_block():
    tasks.noop.enqueue()
    with assert_enqueues(tasks.noop, count=1) as jobs:
        result = tasks.noop.enqueue()
    assert [job.jid for job in jobs] == [result.id]
    with pytest.raises(AssertionError, match="got 0"), assert_enqueues(tasks.noop):
        pass


@pytest.mark.django_db
def test_assert_enqueues_propagates_an_exception_of_its_block():
    with pytest.raises(ZeroDivisionError), assert_enqueues(tasks.noop):
        _ = 1 / 0


def test_assertions_work_with_the_dummy_backend_without_a_database(tasks_setting):
    tasks_setting("DummyBackend")
    with assert_enqueues(tasks.add, args=(1, 2)):
        tasks.add.enqueue(1, 2)
    tasks.send_invoice.enqueue(1)
    assert [job.queue for job in enqueued_jobs()] == ["default", "mail"]


def test_enqueued_jobs_is_empty_with_the_immediate_backend(tasks_setting):
    tasks_setting("ImmediateBackend")
    tasks.add.enqueue(1, 2)
    assert enqueued_jobs() == []


@pytest.mark.django_db
def test_assert_enqueued_rejects_the_undecorated_function():
    with pytest.raises(TypeError, match="expected a task, the function with @task"):
        assert_enqueued(tasks.add.func)


def test_enqueued_jobs_rejects_a_remote_broker():
    with override_settings(FAKTORY={"BROKER": "remote"}), pytest.raises(FaktoryError, match="BROKER"):
        enqueued_jobs()
