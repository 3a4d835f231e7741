"""Test two users who act on the same rows, and sessions that end in the middle of an action.

Each user reads one clear line, no action is executed or logged twice, and no page is broken.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from threading import Barrier

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connections
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_faktory.models import Job, Queue
from django_faktory.operations import bulk
from tests.factories import T0, CronFactory, JobFactory, LockFactory, QueueFactory, WorkerFactory

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]

AGAIN = "Nothing done. If you had to log in again, repeat the action."


@pytest.fixture
def two(django_user_model):
    """Return the browsers of two superusers."""
    clients = []
    for name in ("ada", "grace"):
        client = Client()
        client.force_login(django_user_model.objects.create_superuser(name, password="secret"))
        clients.append(client)
    return clients


def address(name, *args):
    return reverse(f"admin:django_faktory_{name}", args=args)


def post(client, path, **form):
    """Return the messages of the page that follows."""
    answer = client.post(path, form, follow=True)
    assert answer.status_code == 200
    return read_messages(answer)


def read_messages(answer):
    found = re.search(r'<ul class="messagelist">(.*?)</ul>', answer.content.decode(), re.DOTALL)
    return unescape(" ".join(re.sub(r"<[^>]*>", " ", found[1]).split())) if found else ""


def read_run(page):
    """Return the signed run in the form of a page."""
    return re.search(r'name="run" value="([^"]+)"', page.content.decode())[1]


def act(client, job, verb):
    return post(client, address("job_act", job.pk, verb), confirmed="yes")


def act_on_list(client, verb, *jobs):
    return post(
        client, address("job_changelist"), action=verb, _selected_action=[job.pk for job in jobs], confirmed="yes"
    )


def test_a_job_that_another_user_has_discarded_is_not_retried(two):
    ada, grace = two
    job = JobFactory(dead=True)
    assert "Discarded" in act(ada, job, "discard")
    for verb in ("retry", "discard"):
        assert act(grace, job, verb) == "Nothing done: the job no longer exists."
    assert post(grace, address("job_try", job.pk)) == "Nothing done: the job no longer exists."
    assert post(grace, address("job_edit", job.pk), args="[1]") == "Nothing done: the job no longer exists."
    assert LogEntry.objects.count() == 1


def test_a_job_that_another_user_has_retried_is_retried_once(two):
    ada, grace = two
    job = JobFactory(dead=True)
    assert act(ada, job, "retry") == f"Retried: {job.jid}"
    assert act(grace, job, "retry") == "Retry now: nothing done, the job has changed its state meanwhile."
    assert "Nothing done: the job is now enqueued." in post(grace, address("job_try", job.pk))
    assert LogEntry.objects.count() == 1


def test_selected_jobs_that_another_user_has_retried_are_neither_changed_nor_logged_again(two):
    ada, grace = two
    first, second, third = jobs = JobFactory.create_batch(3, dead=True)
    assert act_on_list(ada, "retry", first, second) == "Retried 2 jobs."
    assert act_on_list(grace, "retry", *jobs) == "Retried 1 job. 2 skipped: already in another state."
    assert act_on_list(ada, "retry", *jobs) == "Retried 0 jobs. 3 skipped: already in another state."
    logged = LogEntry.objects.order_by("pk").values_list("user__username", "object_id")
    assert sorted(logged) == sorted([("ada", str(first.pk)), ("ada", str(second.pk)), ("grace", str(third.pk))])


def test_two_bulk_runs_on_the_same_jobs_change_each_job_once(two):
    JobFactory.create_batch(45, dead=True)
    runs = []
    for client, verb in zip(two, ("retry", "discard"), strict=True):
        page = client.post(f"{address('job_all')}?verb={verb}&state=dead", {"why": "both"})
        assert page.status_code == 200
        runs.append(bulk.load_signed(read_run(page), user=client.session["_auth_user_id"]))
    while not all(run.is_over for run in runs):  # one step each in turn
        runs = [run.step(using="default", size=10) for run in runs]
    steps = [{"run": run.sign()} for run in runs]
    texts = [
        client.post(address("job_all_step"), step).content.decode() for client, step in zip(two, steps, strict=True)
    ]
    assert all("<strong>Done.</strong>" in text for text in texts)
    retried, discarded = (int(re.search(r"</strong> \w+: (\d+)", text)[1]) for text in texts)
    assert Job.objects.dead().count() == 0
    assert retried == Job.objects.in_state("enqueued").count()
    assert retried + discarded == 45
    assert retried
    assert discarded


def test_of_two_simultaneous_retries_of_the_same_jobs_each_job_counts_once(two):
    jobs = JobFactory.create_batch(20, dead=True)
    barrier = Barrier(2)

    def retry(client):
        try:
            barrier.wait(60)
            return act_on_list(client, "retry", *jobs)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as pool:
        lines = list(pool.map(retry, two))
    assert sum(int(re.match(r"Retried (\d+) job", line)[1]) for line in lines) == 20
    assert Job.objects.in_state("enqueued").count() == 20


def test_a_paused_quieted_or_released_row_is_reported_to_the_second_user(two):
    ada, grace = two
    QueueFactory(name="mail")
    queues = address("queue_changelist")
    assert post(ada, queues, action="pause", _selected_action="mail") == "Paused: 1 queue."
    paused_at = Queue.objects.get().paused_at
    line = post(grace, queues, action="pause", _selected_action="mail")
    assert line == "Paused: 0 queues. 1 skipped: already paused."
    assert Queue.objects.get().paused_at == paused_at
    assert LogEntry.objects.count() == 1
    WorkerFactory(wid="w1", beat_at=timezone.now())
    workers = address("workerprocess_changelist")
    assert "Quiet requested for 1 worker: it gets no more jobs." in post(
        ada, workers, action="quiet", _selected_action="w1"
    )
    WorkerFactory(wid="w2", beat_at=timezone.now())
    line = post(grace, workers, action="quiet", _selected_action=["w1", "w2"])
    assert line.startswith("Quiet requested for 1 worker: ")
    assert line.endswith("1 skipped: already in this state, or stopping.")
    assert [*LogEntry.objects.order_by("pk").values_list("object_id", flat=True)] == ["mail", "w1", "w2"]
    entry = CronFactory(name="nightly", next_at=T0)
    assert post(ada, address("cronentry_act", entry.pk, "pause")) == "Nightly: paused."
    assert post(grace, address("cronentry_act", entry.pk, "pause")) == "Nightly: was paused already."
    lock = LockFactory()
    locks = address("joblock_changelist")
    assert "Released 1 lock." in post(ada, locks, action="release", _selected_action=lock.pk, confirmed="yes")
    assert "Released 0 locks." in post(grace, locks, action="release", _selected_action=lock.pk, confirmed="yes")


def log_in_again(client, answer):
    """Log in on the page to which an ended session led; return the page after it."""
    assert answer.status_code == 302
    assert "/login/" in answer.url
    return client.post(answer.url, {"username": "ada", "password": "secret"}, follow=True)


def test_an_action_after_the_end_of_the_session_is_not_executed_and_leads_back(two):
    ada, _ = two
    job = JobFactory(dead=True)
    entry = CronFactory(name="nightly", next_at=T0)
    for path in (
        address("job_act", job.pk, "retry"), address("job_act", job.pk, "discard"), address("job_try", job.pk),
        address("cronentry_act", entry.pk, "run_now"), address("task_pause"), address("job_all_step"),
    ):  # fmt: skip
        ada.logout()
        answer = log_in_again(ada, ada.post(path, {"task": "noop", "verb": "pause"}))
        assert answer.status_code == 200, path
        assert read_messages(answer) == AGAIN, path
    assert Job.objects.get().state == "dead"
    assert not LogEntry.objects.exists()


def test_a_bulk_run_can_be_continued_after_the_same_user_has_logged_in_again(two):
    ada, grace = two
    JobFactory.create_batch(25, dead=True)
    page = ada.post(f"{address('job_all')}?verb=retry&state=dead")
    begun = bulk.load_signed(read_run(page), user=ada.session["_auth_user_id"])
    run = begun.step(using="default", size=10).sign()
    ada.logout()
    log_in_again(ada, ada.post(address("job_all_step"), {"run": run}))
    assert Job.objects.dead().count() == 15
    assert "Start it again for the remaining jobs" in post(grace, address("job_all_step"), run=run)
    assert Job.objects.dead().count() == 15
    page = ada.post(address("job_all_step"), {"run": run})
    assert "Retried: 25" in page.content.decode()
    assert Job.objects.dead().count() == 0
