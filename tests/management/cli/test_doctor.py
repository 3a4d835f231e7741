"""`faktory doctor`: the alarms as text and JSON, with an exit code for scripts; and typing errors of names."""

import pytest
from django.utils import timezone, translation

from tests.factories import JobFactory, QueueFactory
from tests.operations.test_alarms import running_worker, waiting

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
