"""Test the overview page: its content, its number of queries, and its permission."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_faktory.admin.overview import charts, data
from django_faktory.admin.overview.charts import Point
from django_faktory.core.histograms import Series
from django_faktory.models import Limit, OutboxEntry, Queue
from django_faktory.operations import alarms, error_groups
from django_faktory.store.dialects import dialect_of
from django_faktory.store.dialects.values import Tally
from django_faktory.store.limits import definitions
from django_faktory.store.statistics import histograms
from tests.factories import JobFactory, QueueFactory, WorkerFactory
from tests.store.limits.conftest import Node

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]

PAGE = "admin:django_faktory_overview_changelist"
PART = "admin:django_faktory_overview_part"


def seen(client, name=PAGE):
    answer = client.get(reverse(name))
    assert answer.status_code == 200
    return answer.content.decode()


def test_the_page_of_an_empty_project_states_that_it_is_empty(admin_client):
    page = seen(admin_client)
    for text in ("No problems found.", "No queues yet.", "No workers running."):
        assert text in page


def test_the_page_lists_current_problems(admin_client):
    QueueFactory(name="mail", paused_at=timezone.now() - timedelta(hours=3))
    JobFactory(queue="mail")
    JobFactory(dead=True, errtype="Timeout", jobtype="shop.send", failure='{"message":"order 7 took 30 s"}')
    OutboxEntry.objects.create(jid="refused-job", queue="mail", job="{}", error="no room")
    WorkerFactory(hostname="app-1", pid=7, beat_at=timezone.now() - timedelta(hours=1))
    page = seen(admin_client)
    for text in (
        "Queue mail is paused; waiting: 1",
        ">3 h</time>",
        "Timeout",
        "order 7 took 30 s",
        "Refused jobs in the outbox: 1",
        "Worker app-1:7 sends no heartbeat",
    ):
        assert text in page


def test_a_button_resumes_a_paused_queue_with_work_behind_it(admin_client):
    QueueFactory(name="mail", paused_at=timezone.now())
    JobFactory(queue="mail")
    [line] = data.read(using="default").alarms
    [button] = line.buttons
    assert button.label == "Resume queue"
    assert admin_client.post(button.url, dict(button.fields)).url == reverse(PAGE)
    assert Queue.objects.get().paused_at is None


def test_a_button_resumes_a_paused_task_with_work_behind_it(admin_client):
    definitions.pause(["noop"], using="default")
    node = Node()
    node.push("a")
    assert node.fetch() == []
    [button] = [button for line in data.read(using="default").alarms for button in line.buttons]
    assert button.label == "Resume task"
    assert admin_client.post(button.url, dict(button.fields)).url == reverse(PAGE)
    assert not Limit.objects.exists()


def test_the_alarm_of_a_failing_task_links_to_its_page_and_pauses_it(admin_client):
    WorkerFactory(seen_at=timezone.now(), beat_at=timezone.now())
    series = Series(started=9, succeeded=0, failed=9)
    histograms.add({("mail", "shop.charge"): series}, using="default", now=timezone.now() - timedelta(minutes=2))
    [line] = data.read(using="default").alarms
    assert admin_client.get(line.link).context["task"] == "shop.charge"
    [button] = line.buttons
    assert f">{button.label}</button>" in seen(admin_client)
    assert admin_client.post(button.url, dict(button.fields)).url == reverse(PAGE)
    assert Limit.objects.get(scope="task", name="shop.charge").paused_by == "admin"


def test_users_without_the_permission_see_no_button():
    QueueFactory(name="mail", paused_at=timezone.now())
    JobFactory(queue="mail")
    [line] = data.read(may=lambda act: act != "queue.resume", using="default").alarms
    assert line.buttons == ()
    assert line.alarm.text == "Queue mail is paused; waiting: 1"


@pytest.mark.parametrize("kind", sorted(alarms.KINDS))
def test_the_link_of_each_alarm_leads_to_a_page(admin_client, monkeypatch, kind):
    subjects = {"silent-worker": "wid-1", "unserved-queue": "mail_2", "late-queue": "mail_2", "paused-queue": "mail_2"}
    QueueFactory(name="mail_2")
    WorkerFactory(wid="wid-1")
    alarm = alarms.Alarm(kind, subjects.get(kind, "some name"), "text", "Advice.", None, 1)
    monkeypatch.setattr(alarms, "read", lambda using: [alarm])
    [line] = data.read(using="default").alarms
    assert admin_client.get(line.link).status_code == 200


def test_the_page_shows_latency_running_jobs_and_workers(admin_client):
    QueueFactory(name="mail")
    JobFactory.create_batch(2, queue="mail", enqueued_at=timezone.now() - timedelta(minutes=5, seconds=2))
    JobFactory(working=True, jobtype="shop.slow", wid="w1", started_at=timezone.now() - timedelta(hours=2))
    WorkerFactory(wid="w1", hostname="app-1", rss_kb=200_000)
    page = seen(admin_client)
    for text in ("5 min", "shop.slow", "app-1:1", "195 MB"):
        assert text in page


def test_the_fullest_of_many_queues_are_shown():
    for number in range(data.QUEUES_SHOWN + 5):
        QueueFactory(name=f"q{number:02}", paused_at=timezone.now())
    JobFactory.create_batch(2, queue="q24")
    JobFactory.create_batch(1, queue="q07")
    read = data.read(using="default")
    assert [(line.name, line.size) for line in read.queues if line.size] == [("q07", 1), ("q24", 2)]
    assert (len(read.queues), read.hidden_queues) == (data.QUEUES_SHOWN, 5)


def test_charts_sum_up_minutes_and_days():
    now = timezone.now()
    passed = Series(succeeded=3, failed=1)
    histograms.add({("q", "t"): passed}, using="default", now=now)
    histograms.add({("q", "t"): passed, ("r", "t"): passed}, using="default", now=now - timedelta(hours=1))
    histograms.add({("q", "t"): passed}, using="default", now=now - timedelta(hours=9))
    with connection.cursor() as cursor:
        dialect_of(connection).count(cursor, datetime.now(UTC), Tally(processed=10, failed=4))
    hours, days = data.read(using="default").charts
    assert hours.summary == "Last 3 hours: 9 succeeded, 3 failed"
    assert days.summary == "Last 30 days: 6 succeeded, 4 failed"


def test_the_page_shows_how_many_jobs_the_highest_bar_has(admin_client):
    histograms.add({("q", "t"): Series(succeeded=3, failed=1)}, using="default", now=timezone.now())
    assert "peak 4 per bar" in seen(admin_client)


def test_bar_heights_are_proportional_to_the_highest_bar():
    chart = charts.build_chart("T", [Point("a", 3, 1), Point("b", 1, 0), Point("c", 0, 0)])
    assert chart.maximum == 4
    assert [(bar.succeeded_height, bar.failed_height) for bar in chart.bars] == [("75", "25"), ("25", "0"), ("0", "0")]
    assert (chart.bars[0].failed_y, chart.bars[0].succeeded_y) == ("75", "0")
    assert charts.build_chart("T", []).bars == ()


@pytest.mark.parametrize(
    ("message", "head"),
    [
        ("order 17 of 3.50 EUR\nmore", "order N of N EUR"),
        ("no row 0x7f3a for 0191e0c0-aaaa-bbbb-cccc-0123456789ab", "no row N for N"),
        ("jid 0191e0c0aaaabbbb is gone", "jid N is gone"),
        ("no such column", "no such column"),
        ("No such customer: 'cus_9s6XK'; ask ada@example.org", "No such customer: N; ask N"),
        ("Your card was declined. request_id=req_8fKq2", "Your card was declined. request_id=N"),
        ("no cus_NsNXKzkNRizNiN in this account", "no N in this account"),
        ("", ""),
    ],
)
def test_error_messages_that_differ_only_in_numbers_are_normalized_equally(message, head):
    assert error_groups.normalize_message(message) == head


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ('{"retry_count":1,"message":"a \\"b\\" \\u00e9","errtype":"E"}', 'a "b" é'),
        ('{"message":"cut \\u00', "cut "),
        ('{"message":"\\ud800\\u0000"}', "?\ufffd"),
        ("", ""),
    ],
)
def test_the_message_is_extracted_from_a_possibly_truncated_failure(failure, message):
    assert error_groups.extract_message(failure) == message


@pytest.mark.django_db(transaction=True)
def test_polls_share_the_numbers_and_the_page_reads_them_again(admin_client):
    JobFactory(dead=True)

    def reads_failures(name):
        with CaptureQueriesContext(connection) as captured:
            seen(admin_client, name)
        return any("failure_beginning" in query["sql"] for query in captured.captured_queries)

    assert [reads_failures(name) for name in (PART, PART, PAGE)] == [True, False, True]
