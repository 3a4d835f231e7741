"""Test the log lines of an attempt on the page of its job: shown, cut, escaped, and hidden by `REDACT`."""

import json

import pytest
from django.test import override_settings
from django.urls import reverse

from django_faktory.operations.serializers import whole_job_of
from tests.admin.pages import words
from tests.factories import JobFactory
from tests.hostile import TEXTS, elements, unwelcome

pytestmark = [pytest.mark.once, pytest.mark.django_db]

MARKER = "m4rk3r-secret"
LINE = f"2026-05-01T12:00:00.123Z WARNING shop.tasks: charged {MARKER}"
HIDES = {"REDACT": "tests.project.redacting.hides_cards"}
HIDES_LINES = {"REDACT_LOG": "tests.project.redacting.hides_lines"}


def attempt(*lines, **fields):
    return {"errtype": "E", "message": "m", "failed_at": "2026-05-01T12:00:01Z", "log": lines, **fields}


def job_with(*attempts):
    return JobFactory(dead=True, failures=len(attempts), history=json.dumps(attempts))


def page(client, job):
    return client.get(reverse("admin:django_faktory_job_change", args=[job.pk])).content.decode()


def download(client, job):
    answer = client.get(reverse("admin:django_faktory_job_download", args=[job.pk, "history"]))
    return b"".join(answer.streaming_content).decode()


def test_the_lines_of_each_attempt_are_in_its_entry(admin_client):
    shown = page(admin_client, job_with(attempt("first line", "second line"), attempt(), attempt("third line")))
    entries = [words(entry) for entry in shown.split("<li")]
    [first] = [entry for entry in entries if "Attempt 1 failed" in entry]
    assert "Log, 2 lines first line second line" in first
    [second] = [entry for entry in entries if "Attempt 2 failed" in entry]
    assert "Log" not in second
    assert any("Attempt 3 failed" in entry and "Log, 1 line third line" in entry for entry in entries)


def test_the_lines_of_a_successful_run_are_in_its_entry(admin_client):
    run = {"kind": "log", "wid": "w1", "attempt": 2, "log": ["first line", "second line"]}
    job = JobFactory(succeeded=True, failures=1, history=json.dumps([attempt(), run]))
    [entry] = [words(part) for part in page(admin_client, job).split("<li") if "Succeeded" in words(part)]
    assert "Log, 2 lines first line second line" in entry


def test_the_lines_of_a_run_that_is_about_to_end_are_in_its_entry(admin_client):
    run = {"kind": "log", "wid": "w1", "attempt": 1, "log": ["first line"]}
    shown = words(page(admin_client, JobFactory(working=True, history=json.dumps([run]))))
    assert "Attempt 1 running" in shown
    assert "Log, 1 line first line" in shown
    assert "no effect" not in shown


def test_the_api_and_the_command_line_hide_lines(db):
    job = JobFactory(succeeded=True, failures=1, history=json.dumps([attempt(LINE), {"kind": "log", "log": [LINE]}]))
    assert json.dumps(whole_job_of(job)).count(MARKER) == 2
    with override_settings(FAKTORY=HIDES):
        assert MARKER not in json.dumps(whole_job_of(job))
    with override_settings(FAKTORY=HIDES | HIDES_LINES):
        assert json.dumps(whole_job_of(job)).count("m4rk3r-****") == 2


def test_the_lines_of_a_run_whose_report_came_too_late_are_shown(admin_client):
    run = {"kind": "log", "wid": "w1", "attempt": 1, "log": ["first line"]}
    job = JobFactory(history=json.dumps([run, attempt()]), failures=1, dead=True)
    shown = words(page(admin_client, job))
    assert "A run ended; its report had no effect on w1 Log, 1 line first line" in shown
    assert "Attempt 1 failed" in shown


def test_an_attempt_shows_the_release_of_its_worker(admin_client):
    assert "release 2.4.<1>" in words(page(admin_client, job_with(attempt(release="2.4.<1>"), attempt())))


def test_redaction_of_arguments_hides_all_lines(admin_client):
    job = job_with(attempt(LINE))
    assert MARKER in page(admin_client, job)
    assert MARKER in download(admin_client, job)
    with override_settings(FAKTORY=HIDES):
        assert MARKER not in page(admin_client, job)
        assert "Log, " not in page(admin_client, job)
        assert json.loads(download(admin_client, job)) == [attempt(log=[])]


def test_the_projects_function_decides_which_lines_are_shown(admin_client):
    job = job_with(attempt(LINE))
    for settings in (HIDES_LINES, HIDES | HIDES_LINES):
        with override_settings(FAKTORY=settings):
            assert "charged m4rk3r-****" in page(admin_client, job)
            assert "charged m4rk3r-****" in download(admin_client, job)
            assert MARKER not in page(admin_client, job) + download(admin_client, job)


@pytest.mark.parametrize("function", ["fails", "returns_no_json", "hides_all"])
def test_a_function_that_fails_hides_all_lines(admin_client, function):
    job = job_with(attempt(LINE))
    with override_settings(FAKTORY={"REDACT_LOG": f"tests.project.redacting.{function}"}):
        assert MARKER not in page(admin_client, job) + download(admin_client, job)
        assert "[hidden]" in page(admin_client, job)


@pytest.mark.parametrize("text", ['"log"', '["log"]', '[{"log":7}]', '[{"log":[7]}]', '{"log":["m4rk3r-secret"]}'])
def test_a_malformed_history_with_lines_is_shown_and_reveals_nothing(admin_client, text):
    job = JobFactory(dead=True, history=text)
    with override_settings(FAKTORY=HIDES):
        assert MARKER not in page(admin_client, job) + download(admin_client, job)
    assert page(admin_client, job)


def test_many_lines_are_cut_to_the_room_of_the_timeline(admin_client):
    job = job_with(*[attempt(*["<" * 160] * 50)] * 50)
    assert len(page(admin_client, job)) < 250_000


@pytest.mark.parametrize("name", TEXTS)
def test_hostile_lines_add_no_element_to_the_page(admin_client, name):
    text = TEXTS[name].encode("utf-8", "replace").decode()  # a worker stores no half of a character
    shown = page(admin_client, job_with(attempt(text, text)))
    assert unwelcome(shown) == []
    assert elements(shown) == elements(page(admin_client, job_with(attempt("harmless", "harmless"))))
