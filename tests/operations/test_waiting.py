"""Why a job waits: page, command line and API give the reason first, and with a bounded number of statements."""

import re
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_faktory.core.payloads import failure
from django_faktory.models import Job, Queue
from django_faktory.operations import waiting
from django_faktory.store.limits import definitions
from tests.admin.pages import words
from tests.factories import JobFactory, LockFactory, QueueFactory, WorkerFactory
from tests.management.cli.conftest import asked, faktory  # noqa: F401  (fixtures)
from tests.store.limits.conftest import Node, jid, limit

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z]+"


def served(*queues):
    now = timezone.now()
    WorkerFactory(wid="w1", hostname="app-1", pid=7, queues=["default", *queues], threads=5, seen_at=now, beat_at=now)


def pushed(*names, **fields):
    node = Node()
    node.push(*names, **fields)
    Queue.objects.get_or_create(name=fields.get("queue", "default"))
    return node


# Each returns the short name of the job that waits, the kind of the reason, and its text as a pattern.


def in_a_paused_queue():
    pushed("a")
    Queue.objects.all().pause(by="anna", reason="ticket 77")
    return "a", "paused-queue", f"Queue default is paused since {TIME} by anna: ticket 77"


def of_a_paused_task():
    served()
    definitions.pause(["noop"], using="default", by="anna")
    pushed("a").fetch()
    return "a", "paused-task", f"Task noop is paused since {TIME} by anna"


def of_a_paused_task_that_no_worker_has_seen():
    served()
    pushed("a")
    definitions.pause(["noop"], using="default", by="anna", reason="bad deploy")
    return "a", "paused-task", f"Task noop is paused since {TIME} by anna: bad deploy"


def without_workers():
    pushed("a")
    return "a", "no-workers", "No worker runs: start manage.py runfaktory"


def in_an_unserved_queue():
    served()
    pushed("a", queue="legacy")
    return "a", "unserved-queue", "No running worker takes jobs of queue legacy"


def in_a_queue_that_a_silent_kind_of_worker_ignores():
    WorkerFactory(seen_at=timezone.now())
    JobFactory(jid=jid("a"), queue=QueueFactory(name="legacy").name, enqueued_at=timezone.now() - timedelta(minutes=9))
    return "a", "unserved-queue", "No running worker takes jobs of queue legacy"


def behind_a_limit():
    served()
    limit("task", "noop", 1)
    pushed(*"abc").fetch(3)
    return "c", "limit", "Limit of task noop: 1 of 1 running; ahead: 1"


def behind_a_limit_of_its_queue():
    served()
    limit("queue", "default", 1)
    pushed(*"abc").fetch(3)
    return "c", "limit", "Limit of queue default: 1 of 1 running; ahead: 1"


def behind_a_limit_of_its_key():
    served()
    limit("key", "customer", 1)
    pushed(*"ab", custom={"limit": "customer:42"}).fetch(2)
    return "b", "limit", "Limit of key customer:42: 1 of 1 running; ahead: 0"


def behind_a_rate():
    served()
    limit("task", "noop", "1/h")
    pushed(*"ab").fetch(2)
    return "b", "rate", f"Limit of task noop: 1/h; the next jobs start at {TIME}; ahead: 0"


def behind_a_lock():
    served()
    JobFactory(jid=jid("b"), blocked=True)
    LockFactory(key="key", jid="the-holder", expires_at=timezone.now() + timedelta(hours=1))
    return "b", "lock", f"Lock key is held by job the-holder, until {TIME} at least; ahead: 0"


def of_an_unknown_task():
    node = pushed("a", jobtype="shop.tasks.chrage")
    [job] = node.reserve()
    error = {"errtype": "UnknownJobType", "message": "no task is registered", "verdict": "later", "retry_in_s": 20.0}
    assert node.broker.fail([failure(jid=job.jid, wid=job.wid, attempt=job.attempt, **error)]) == [True]
    text = rf"No worker knows task shop\.tasks\.chrage \(UnknownJobType\), since {TIME}; next try at {TIME}\. It .*"
    return "a", "unknown-task", text


def scheduled_for_later():
    JobFactory(jid=jid("a"), scheduled=True, run_at=timezone.now() + timedelta(hours=1))
    return "a", "scheduled", f"Scheduled for {TIME}"


def scheduled_into_a_paused_queue():
    QueueFactory(name="default")
    JobFactory(jid=jid("a"), scheduled=True, run_at=timezone.now() + timedelta(hours=1))
    Queue.objects.all().pause(by="anna")
    return "a", "scheduled", rf"Scheduled for {TIME}\. Queue default is paused since {TIME} by anna"


def waiting_for_a_retry():
    JobFactory(jid=jid("a"), retries=True, run_at=timezone.now() + timedelta(hours=1))
    return "a", "retry", f"Attempt 1 of 26 failed; next attempt at {TIME}"


def due_without_maintenance():
    JobFactory(jid=jid("a"), scheduled=True, run_at=timezone.now() - timedelta(hours=1))
    return "a", "overdue", f"Due since {TIME}, but no node enqueues it.*"


def in_line():
    served()
    pushed(*"abc")
    pushed("d", priority=9)
    return "b", "queued", "Ahead of it in queue default: 2"


def first_in_line():
    served()
    pushed("a")
    return "a", "queued", "Next in queue default"


CASES = [
    in_a_paused_queue, of_a_paused_task, of_a_paused_task_that_no_worker_has_seen, without_workers,
    in_an_unserved_queue, in_a_queue_that_a_silent_kind_of_worker_ignores, behind_a_limit, behind_a_limit_of_its_queue,
    behind_a_limit_of_its_key, behind_a_rate, behind_a_lock, of_an_unknown_task, scheduled_for_later,
    scheduled_into_a_paused_queue, waiting_for_a_retry, due_without_maintenance, in_line, first_in_line,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_page_command_and_api_give_the_reason_why_a_job_waits(case, admin_client, asked):  # noqa: F811
    name, kind, pattern = case()
    job = Job.objects.get(jid=jid(name))
    with CaptureQueriesContext(connection) as caught:
        reason = waiting.read_reason(job, using="default")
    assert len(caught) <= 8
    assert reason.kind == kind
    assert re.fullmatch(pattern, reason.text)
    page = admin_client.get(reverse("admin:django_faktory_job_change", args=[job.pk])).content.decode()
    first_line = re.search(r'data-faktory-refresh[^>]*>\s*<p class="faktory-why">(.*?)</p>', page, re.DOTALL)[1]
    assert re.fullmatch(pattern, words(first_line))
    for link in re.findall('href="([^"]+)"', first_line):
        assert admin_client.get(link).status_code == 200
    api = admin_client.get(f"/api/jobs/{job.jid}/").json()["waiting_reason"]
    assert (api["kind"], api["text"]) == (kind, reason.text)
    assert asked("job", job.jid)["waiting_reason"] == api


def test_the_command_prints_the_reason_first(faktory):  # noqa: F811
    in_a_paused_queue()
    assert "Queue default is paused" in faktory("job", jid("a")).out.splitlines()[0]


@pytest.mark.parametrize("state", ["working", "succeeded", "dead", "discarded", "expired"])
def test_a_job_that_runs_or_has_ended_has_no_reason(state):
    assert waiting.read_reason(JobFactory(**{state: True}), using="default") is None


def test_the_jobs_ahead_are_counted_up_to_a_limit():
    served()
    Job.objects.bulk_create(JobFactory.many(waiting.MAX_AHEAD + 5))
    job = JobFactory(enqueued_at=timezone.now())
    assert waiting.read_reason(job, using="default").text == "Ahead of it in queue default: 10,000+"


@pytest.mark.parametrize(("queue", "text"), [("default", "Workers app-1:7"), ("legacy", "Workers none: no running")])
def test_the_page_of_a_queue_lists_its_workers_or_says_that_it_has_none(admin_client, queue, text):
    served()
    QueueFactory(name=queue)
    assert text in words(admin_client.get(reverse("admin:django_faktory_queue_change", args=[queue])).content.decode())
