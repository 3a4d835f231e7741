"""Test the job list and the job page: queries, views, and actions on one job or on all matching jobs."""

import re
from datetime import timedelta
from urllib.parse import urlencode

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_faktory.admin.jobs.bulk_views import count_jobs
from django_faktory.core.histograms import Series
from django_faktory.models import Batch, Job, JobStep, Tracking
from django_faktory.models.cron import CronRun
from django_faktory.models.job import RECENT
from django_faktory.models.permissions import needs
from django_faktory.operations import bulk, error_groups
from django_faktory.operations.job_actions import JOB_ACTIONS
from django_faktory.store.statistics import histograms
from example_project.shop.models import Order
from tests.admin.pages import words
from tests.admin.test_admin import act
from tests.admin.test_errors import all_of, page
from tests.factories import T0, CronFactory, JobFactory, LockFactory, QueueFactory, WorkerFactory, staff_user
from tests.project.tasks import echo

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]

JOBS = "admin:django_faktory_job_changelist"
VERBS = {"retry": "dead", "requeue": "dead", "cancel": "working", "kill": "retries", "discard": "dead", "prune": "dead"}


def test_an_invalid_query_shows_an_error_and_finds_nothing(admin_client):
    job = JobFactory()
    shown = page(admin_client, "changelist", "q=stat:dead")
    assert "such key: stat" in shown
    assert job.jid not in shown


@pytest.mark.parametrize("query", ["state=dead", "q=dead", "q=failed_before:1h"])
def test_a_list_of_failed_jobs_begins_with_the_latest_failure(admin_client, query):
    jobs = [JobFactory(dead=True, failed_at=T0 + timedelta(hours=hour)) for hour in (1, 3, 2)]
    shown = page(admin_client, "changelist", query)
    places = [shown.index(job.jid) for job in jobs]
    assert places[1] < places[2] < places[0]


def test_links_to_the_states_keep_the_query(admin_client):
    JobFactory(queue="mail")
    shown = page(admin_client, "changelist", "state=enqueued&q=queue:mail")
    assert 'href="?state=dead&amp;q=queue%3Amail"' in shown
    assert 'href="?state=enqueued&amp;q=queue%3Amail" aria-current="page"' in shown


def test_a_search_without_an_index_covers_only_recent_jobs(admin_client):
    old = JobFactory(queue="mail")
    new = JobFactory(queue="mail", pk=old.pk + RECENT)
    shown = page(admin_client, "changelist", "q=queue:mail")
    assert new.jid in shown
    assert old.jid not in shown


def test_a_bulk_action_changes_all_matching_jobs_and_no_others(admin_client):
    mine, queue = JobFactory(dead=True, queue="mail"), JobFactory(dead=True)
    waits = JobFactory(queue="mail")
    shown = page(admin_client, "changelist", "state=dead&q=queue:mail")
    assert "verb=retry&amp;q=queue%3Amail&amp;state=dead" in shown
    assert "Matching jobs 1 job" in words(page(admin_client, "all", "verb=discard&q=queue:mail&state=dead"))
    text, _ = all_of(admin_client, "discard", "q=queue:mail&state=dead")
    assert "Discarded: 1." in text
    assert set(Job.objects.values_list("pk", flat=True)) == {queue.pk, waits.pk}
    assert LogEntry.objects.last().object_repr
    assert not Job.objects.filter(pk=mine.pk).exists()


@pytest.mark.parametrize("query", ["bid=b-1", "about=shop.order/1"])
def test_a_bulk_action_respects_batch_and_object_filters(admin_client, query):
    JobFactory(dead=True, bid="b-1", about="shop.order/1")
    JobFactory(dead=True)
    Batch.objects.create(bid="b-1", total=1, pending=1)
    all_of(admin_client, "retry", query)
    assert Job.objects.dead().count() == 1


def test_a_bulk_action_on_recent_jobs_does_not_extend_to_older_ones():
    old, *new = (JobFactory(dead=True, payload='{"args":["x1"]}') for _ in range(3))
    run = bulk.begin("retry", "dead text:x1 among:2", using="default")
    Job.objects.filter(pk=new[-1].pk).retry()  # now the older job is among the newest two
    while not run.is_over:
        run = run.step(using="default", size=1)
    assert list(Job.objects.dead()) == [old]
    assert set(Job.objects.enqueued()) == set(new)


def test_select_across_redirects_to_the_confirmation_page(admin_client):
    job = JobFactory(dead=True)
    asked = {"action": "discard", "_selected_action": [job.pk], "select_across": "1"}
    answer = admin_client.post(f"{reverse(JOBS)}?state=dead", asked)
    assert answer.url == f"{reverse('admin:django_faktory_job_all')}?state=dead&verb=discard"
    assert Job.objects.get().state == "dead"


@pytest.mark.parametrize("verb", ["discard", "kill", "prune", "cancel"])
def test_destructive_actions_require_confirmation(admin_client, verb):
    job = JobFactory(**{VERBS[verb]: True})
    for address, asked in (
        (reverse(JOBS), {"action": verb, "_selected_action": [job.pk], "why": "<why>"}),
        (reverse("admin:django_faktory_job_act", args=[job.pk, verb]), {"why": "<why>"}),
    ):
        shown = admin_client.post(address, asked).content.decode()
        assert "No, take me back" in shown
        assert 'value="&lt;why&gt;"' in shown
        assert Job.objects.get().state == VERBS[verb]
        assert not Job.objects.get().is_cancelled
    assert not LogEntry.objects.exists()


def test_user_and_reason_of_an_action_are_logged(admin_client, admin_user):
    jobs = [JobFactory(dead=True), JobFactory(dead=True)]
    act(admin_client, JOBS, "retry", *jobs, why="deployed 42")
    entries = LogEntry.objects.all()
    assert {(entry.user, entry.get_change_message()) for entry in entries} == {(admin_user, "Retried: deployed 42")}
    assert {entry.object_repr for entry in entries} == set(map(str, jobs))
    history = reverse("admin:django_faktory_job_history", args=[jobs[0].pk])
    assert "deployed 42" in admin_client.get(history).content.decode()


def test_a_forged_or_foreign_bulk_step_changes_nothing(admin_client, client):
    JobFactory(dead=True)
    step = reverse("admin:django_faktory_job_all_step")
    begun = bulk.begin("discard", "dead", user="0", using="default")
    for sealed in ("", "forged", begun.sign(), begun.sign()[:-2]):
        text = admin_client.post(step, {"run": sealed}, follow=True).content.decode()
        assert "Start it again for the remaining jobs" in text
    assert Job.objects.count() == 1


@pytest.mark.parametrize("verb", JOB_ACTIONS)
def test_each_step_of_a_bulk_action_checks_the_user_and_permission_again(client, verb):
    """Check for a permission that was revoked in between, and for a form that another user received."""
    job = JobFactory(**dict.fromkeys({min(JOB_ACTIONS[verb].states)} - {"enqueued"}, True))
    codename = needs(JOB_ACTIONS[verb].needs).partition(".")[2]
    user, another = (staff_user("view_job", codename) for _ in range(2))
    client.force_login(user)
    begun = client.post(f"{reverse('admin:django_faktory_job_all')}?verb={verb}&state={job.state}", {})

    def change_jobs(by):
        client.force_login(by)
        before = list(Job.objects.values())
        client.post(reverse("admin:django_faktory_job_all_step"), {"run": begun.context["signed_run"]})
        return list(Job.objects.values()) != before

    user.user_permissions.clear()
    assert not change_jobs(user)
    assert not change_jobs(another)
    user.user_permissions.set(another.user_permissions.all())
    assert change_jobs(user)


@pytest.mark.parametrize("jobtype", ["elsewhere", echo.jobtype])
@pytest.mark.parametrize("text", ["no json", "[]", "null", '{"args":', '{"args":7}', '{"args":[],"custom":7}', ""])
def test_a_job_with_malformed_texts_is_shown(admin_client, text, jobtype):
    job = JobFactory(dead=True, errtype="E", jobtype=jobtype, payload=text, result=text, history=text, failure=text)
    for name, query, *args in (
        ("change", "", job.pk), ("edit", "", job.pk), ("changelist", "state=dead"), ("errors", ""),
        ("error", error_groups.read_kind(job).query),
    ):  # fmt: skip
        assert page(admin_client, name, query, *args)


def test_the_page_of_a_job_links_to_its_related_objects(admin_client):
    order = Order.objects.create(customer="ada@example.org", item="Engine", price="1.00")
    batch = Batch.objects.create(bid="b-1", description="its batch", total=1, pending=1)
    entry = CronFactory()
    worker = WorkerFactory(wid="w1")
    queue = QueueFactory(name="mail")
    job = JobFactory(working=True, queue="mail", about=f"shop.order/{order.pk}", bid=batch.bid, failures=1)
    CronRun.objects.create(entry=entry, jid=job.jid, outcome="enqueued", tick=timezone.now())
    shown = page(admin_client, "change", "", job.pk)
    for name, row in (("batch", batch), ("cronentry", entry), ("workerprocess", worker), ("queue", queue)):
        assert reverse(f"admin:django_faktory_{name}_change", args=[row.pk]) in shown
    assert reverse("admin:shop_order_change", args=[order.pk]) in shown
    assert "Attempt 2 running" in shown


def test_the_page_of_a_job_shows_its_interruptions(admin_client):
    failed = '{"errtype":"E","message":"m","failed_at":"2026-05-01T12:00:00Z"}'
    stopped = (
        '{"kind":"interrupted","wid":"w-7","started_at":"2026-05-01T13:00:00Z","failed_at":"2026-05-01T13:00:05Z",'
        '"message":"interrupted by shutdown"}'
    )
    job = JobFactory(working=True, attempt=3, failures=1, interruptions=1, history=f"[{failed},{stopped}]")
    shown = page(admin_client, "change", "", job.pk)
    assert shown.index("Attempt 1 failed") < shown.index("Interrupted by shutdown") < shown.index("Attempt 2 running")
    assert "w-7" in shown
    assert "2 of 26" in shown


@pytest.mark.parametrize("state", ["succeeded", "dead", "discarded", "expired"])
def test_the_page_of_an_ended_job_shows_no_past_fact_as_present(admin_client, state):
    later = timezone.now() + timedelta(hours=1)
    job = JobFactory(**{state: True}, lock_key="k", unique_expires_at=later, expires_at=later, reserved_until=later)
    LockFactory(key="k", expires_at=later)
    Tracking.objects.create(jid=job.jid, percent=98, desc="page 79", updated_at=timezone.now())
    markup = page(admin_client, "change", "", job.pk)
    assert "Last progress 98 % page 79" in words(markup)
    for present in ("<progress", "Lock held by", "Blocked by limit", "Unique until", "Expires", "Reserved until"):
        assert present not in markup


def test_the_page_of_a_job_takes_at_most_fourteen_queries(admin_client, django_assert_max_num_queries):
    job = JobFactory(
        dead=True, bid="b-1", about="shop.order/1", lock_key="k",
        history="[" + ",".join('{"errtype":"E","message":"m","backtrace":["l"]}' for _ in range(60)) + "]",
    )  # fmt: skip
    shown = page(admin_client, "change", "", job.pk)
    assert "10 earlier attempts" in shown
    with django_assert_max_num_queries(14):
        page(admin_client, "change", "", job.pk)


def test_a_cleared_queue_loses_its_waiting_jobs_only(admin_client):
    queue = QueueFactory(name="mail")
    for state in ({}, {"blocked": True}, {"dead": True}):
        JobFactory(queue="mail", **state)
    JobFactory()
    asked = act(admin_client, "admin:django_faktory_queue_changelist", "clear", queue)
    assert "Clear: 2 jobs?" in words(asked.content.decode())
    all_of(admin_client, "clear", "queue=mail")
    assert set(Job.objects.values_list("queue", "state")) == {("mail", "dead"), ("default", "enqueued")}


def test_the_page_of_a_worker_shows_its_running_jobs(admin_client):
    WorkerFactory(wid="w 1/x", rss_kb=300_000, labels=["<gpu>"])
    job = JobFactory(working=True, wid="w 1/x")
    listed = admin_client.get(reverse("admin:django_faktory_workerprocess_changelist")).content.decode()
    [address] = {part for part in listed.split('"') if part.endswith("/change/")}
    shown = admin_client.get(address).content.decode()
    for text in (job.jid, "292 MB", "&lt;gpu&gt;", "Terminate"):
        assert text in shown


def test_terminating_a_worker_requires_confirmation_and_quieting_does_not(admin_client):
    worker = WorkerFactory()
    name = reverse("admin:django_faktory_workerprocess_changelist")
    asked = {"action": "terminate", "_selected_action": [worker.pk]}
    assert "No, take me back" in admin_client.post(name, asked).content.decode()
    worker.refresh_from_db()
    assert worker.state == "running"
    admin_client.post(name, {**asked, "action": "quiet"})
    worker.refresh_from_db()
    assert worker.state == "quiet"
    admin_client.post(name, {**asked, "confirmed": "yes"})
    worker.refresh_from_db()
    assert worker.state == "terminate"


def make_mails_of_which_two_are_recent():
    # Jobs count as recent by the distance of their ids.
    first = JobFactory(jobtype="shop.tasks.mail").pk
    for pk in (first + RECENT, first + RECENT + 1):
        JobFactory(jobtype="shop.tasks.mail", pk=pk)


def test_a_count_of_recent_jobs_only_is_shown_with_a_plus(admin_client):
    make_mails_of_which_two_are_recent()
    address = reverse("admin:django_faktory_job_all")
    text = admin_client.get(address, {"verb": "discard", "q": "task:shop.tasks.mail"}).content.decode()
    assert "2+ jobs" in text
    nothing = admin_client.get(address, {"verb": "discard", "q": "task:shop.tasks.other"}).content.decode()
    assert "0+ jobs" in nothing
    assert "Yes, " in nothing, "the query may match older jobs"
    run = bulk.begin("discard", "task:shop.tasks.mail", using="default")
    assert str(count_jobs(run, using="default")) == "2+"
    while not run.is_over:
        run = run.step(using="default")
    assert not Job.objects.exists()


def test_the_log_entry_of_a_bulk_action_shows_the_capped_count(admin_client):
    make_mails_of_which_two_are_recent()
    address = f"{reverse('admin:django_faktory_job_all')}?verb=discard&q=task:shop.tasks.mail"
    begun = admin_client.post(address, {"why": "old"}).content.decode()
    assert "value=" not in re.search("<progress[^>]*>", begun)[0]
    assert "begun for all matching jobs (2+): old" in LogEntry.objects.latest("pk").change_message


# --- search by what people type


def found(client, text):
    answer = client.get(f"{reverse('admin:django_faktory_job_changelist')}?{urlencode({'q': text})}")
    assert answer.status_code == 200
    return answer.context["cl"].result_list, words(answer.content.decode())


@pytest.fixture
def mails(db):
    histograms.add({("mail", "shop.tasks.send_receipt"): Series(started=1)}, using="default")
    JobFactory(jobtype="shop.tasks.other")
    return JobFactory(jobtype="shop.tasks.send_receipt", jid="one-of-the-receipts", created_at=timezone.now())


@pytest.mark.parametrize(
    "text", ["send_receipt", "task:send_receipt", "shop.tasks.send", "one-of", "one-of-the-receipts"]
)
def test_a_job_is_found_by_the_end_of_its_task_or_the_beginning_of_its_id(admin_client, mails, text):
    jobs, _ = found(admin_client, text)
    assert [job.pk for job in jobs] == [mails.pk]


@pytest.mark.parametrize("text", ["task:send_reciept", "SEND_RECEIPT"])
def test_a_search_that_finds_nothing_suggests_similar_tasks(admin_client, mails, text):
    jobs, shown = found(admin_client, text)
    assert list(jobs) == []
    assert "Did you mean the task shop.tasks.send_receipt" in shown


def test_a_name_that_is_a_task_itself_is_not_replaced(admin_client, mails):
    histograms.add({("mail", "send_receipt"): Series(started=1)}, using="default")
    own = JobFactory(jobtype="send_receipt", created_at=timezone.now())
    jobs, _ = found(admin_client, "task:send_receipt")
    assert [job.pk for job in jobs] == [own.pk]


@pytest.mark.parametrize("query", ["older:2d", "text:example", "nothing-like-it", "dead error:Other"])
def test_a_search_does_not_look_for_the_first_row_without_an_order(admin_client, query):
    JobFactory(dead=True)
    with CaptureQueriesContext(connection) as captured:
        admin_client.get(reverse(JOBS), {"q": query})
    tests_of_existence = [one["sql"] for one in captured.captured_queries if 'SELECT 1 AS "a"' in one["sql"]]
    # With millions of rows PostgreSQL would read the table from its beginning; a jid has a unique index.
    assert [sql for sql in tests_of_existence if "django_faktory_job" in sql and '"jid" =' not in sql] == []


def test_a_job_can_be_started_over_if_it_has_steps(admin_client):
    job = JobFactory(dead=True)
    button = f"{job.pk}/act/restart/"
    assert button not in page(admin_client, "change", "", job.pk)
    JobStep.objects.create(
        job_id=job.pk,
        name="a",
        key="",
        pushed_at=job.created_at,
        attempt=1,
        is_finished=True,
        started_at=T0,
        recorded_at=T0,
    )
    assert button in page(admin_client, "change", "", job.pk)
