"""Test `inline()`: each job runs at the moment when a worker could see it."""

import pytest
from django.db import transaction
from django.test import TestCase

from django_faktory import task
from django_faktory.models import Job
from django_faktory.testing import JobFailed, inline
from tests.project import tasks
from tests.project.models import Mark

pytestmark = pytest.mark.once_if_quick


@task
def enqueues_another():
    tasks.writes_mark.enqueue("by another")
    assert not Mark.objects.exists(), "the other one runs after this one"


def marks():
    return [mark.text for mark in Mark.objects.order_by("pk")]


@pytest.mark.django_db(transaction=True)
def test_outside_a_transaction_a_job_runs_when_it_is_enqueued():
    with inline() as ran:
        tasks.writes_mark.enqueue("one")
        assert marks() == ["one"]
    assert [one.state for one in ran] == ["succeeded"]
    tasks.writes_mark.enqueue("two")
    assert marks() == ["one"]


@pytest.mark.django_db(transaction=True)
def test_in_a_transaction_a_job_runs_when_it_commits():
    with inline():
        with transaction.atomic():
            tasks.writes_mark.enqueue("one")
            with transaction.atomic():
                tasks.writes_mark.enqueue("two")
            assert marks() == []
        assert marks() == ["one", "two"]


@pytest.mark.django_db(transaction=True)
def test_a_job_that_is_rolled_back_is_never_run():
    with inline() as ran:
        with transaction.atomic():
            tasks.writes_mark.enqueue("one")
            transaction.set_rollback(True)
        assert marks() == []
    assert ran == []


@pytest.mark.django_db(transaction=True)
def test_a_job_enqueued_by_a_job_runs_after_it():
    with inline() as ran:
        enqueues_another.enqueue()
    assert [one.state for one in ran] == ["succeeded", "succeeded"]
    assert marks() == ["by another"]


@pytest.mark.django_db(transaction=True)
def test_errors_are_raised_only_with_raise_errors():
    with inline() as ran:
        tasks.fails.enqueue()
    assert [one.state for one in ran] == ["retries"]
    with pytest.raises(JobFailed), inline(raise_errors=True):
        tasks.fails.enqueue()


class InATestCase(TestCase):
    def test_the_transaction_of_the_test_case_does_not_delay_jobs(self):
        with inline():
            tasks.writes_mark.enqueue("one")
            assert marks() == ["one"]

    def test_jobs_of_a_committed_block_run_when_inline_ends(self):
        with inline():
            with transaction.atomic():
                tasks.writes_mark.enqueue("one")
            with transaction.atomic():
                tasks.writes_mark.enqueue("rolled back")
                transaction.set_rollback(True)
            assert marks() == []
        assert marks() == ["one"]
        assert Job.objects.count() == 1
