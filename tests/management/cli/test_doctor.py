"""`faktory doctor`: the alarms as text and JSON, with an exit code for scripts; and typing errors of names."""

import pytest
from django.utils import timezone, translation

from django_faktory.models import Limit, Queue
from tests.factories import JobFactory, QueueFactory
from tests.operations.test_alarms import running_worker, waiting
from tests.project.tasks import add

pytestmark = [pytest.mark.once, pytest.mark.django_db]


def test_doctor_finds_no_problem_in_an_idle_project(asked, faktory):
    assert faktory("doctor").out == "No problems found.\n"
    assert asked("doctor") == {"alarms": []}


def test_doctor_names_a_critical_problem_and_exits_with_4(asked, faktory):
    waiting("mail", minutes=5)
    result = faktory("doctor")
    assert result.code == 4
    assert "CRITICAL  No running worker; jobs waiting: 1 (since " in result.out
    assert "Start manage.py runfaktory" in result.out
    [alarm] = asked("doctor", code=4)["alarms"]
    assert (alarm["kind"], alarm["affected"], alarm["is_critical"]) == ("no-workers", 1, True)


def test_doctor_exits_with_0_for_a_warning(faktory):
    running_worker()
    QueueFactory(name="mail", paused_at=timezone.now())
    JobFactory(queue="mail", enqueued_at=timezone.now())
    result = faktory("doctor")
    assert result.code == 0
    assert "WARNING   Queue mail is paused; waiting: 1" in result.out


@pytest.mark.parametrize("words", [("doctor",), ("top", "--once")])
def test_the_output_is_in_english_in_every_language(faktory, words):
    waiting("mail", minutes=5)
    with translation.override("de"):
        assert "CRITICAL  No running worker; jobs waiting: 1 (since " in faktory(*words).out


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_a_misspelt_queue_is_an_error_that_names_the_similar_one(faktory, verb):
    QueueFactory(name="billing")
    result = faktory(verb, "biling")
    assert result.code == 1
    assert "there is no queue biling; did you mean billing?" in result.err
    assert list(Queue.objects.values_list("name", flat=True)) == ["billing"]


def test_a_queue_can_be_paused_before_its_first_job(asked):
    assert asked("pause", "later", "--new") == {"queues": ["later"]}


def test_a_misspelt_task_is_not_paused(asked, faktory):
    result = faktory("limits", "pause", f"{add.jobtype}x")
    assert result.code == 1
    assert f"did you mean {add.jobtype}?" in result.err
    assert not Limit.objects.exists()
    assert asked("limits", "pause", "of.another.language", "--new") == {"limits": ["of.another.language"]}


def test_a_query_finds_a_task_by_the_end_of_its_name(asked):
    JobFactory(jobtype=add.jobtype, jid="job-of-add")
    JobFactory(jobtype="another.one")
    [job] = asked("jobs", "task:add")["jobs"]
    assert job["jid"] == "job-of-add"
