"""Queues, workers, batches, cron entries, locks, limits and statistics through the API: reading and actions."""

from datetime import UTC, timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.utils import timezone
from rest_framework.test import APIRequestFactory, force_authenticate

from django_faktory.contrib.api import queues
from django_faktory.core.payloads import NewBatch
from django_faktory.models import Batch, Job, JobLock, Limit, Queue, WorkerProcess
from django_faktory.models.cron import CronEntry, CronRun
from django_faktory.operations import bulk
from django_faktory.store.batches import batches, tree
from django_faktory.store.jobs.bulk import CHUNK
from django_faktory.store.store import Store
from tests.factories import T0, CronFactory, JobFactory, LockFactory, QueueFactory, WorkerFactory
from tests.project.tasks import add

pytestmark = [pytest.mark.once, pytest.mark.django_db]

CRON = {"name": "mine", "schedule": "0 2 * * *", "zone": "Europe/Berlin", "jobtype": add.jobtype, "args": [1, 2]}


def names(answer, key="name"):
    assert answer.status == 200, answer.data
    return [row[key] for row in answer.data["results"]]


def last_words():
    return LogEntry.objects.latest("pk").change_message


# --- queues


def test_queues_report_size_latency_and_pause_state(as_root):
    QueueFactory(name="empty", paused_at=T0, paused_by="anna", pause_reason="relay down")
    QueueFactory(name="mail")
    JobFactory(queue="mail", enqueued_at=timezone.now() - timedelta(seconds=100))
    empty, mail = as_root("GET", "queues/").data["results"]
    assert empty == {
        "name": "empty",
        "size": 0,
        "latency_s": 0.0,
        "is_paused": True,
        "paused_at": "2026-05-01T12:00:00Z",
        "paused_by": "anna",
        "pause_reason": "relay down",
    }
    assert (mail["size"], mail["is_paused"], 99 < mail["latency_s"] < 160) == (1, False, True)
    assert as_root("GET", "queues/mail/").data["size"] == 1


@pytest.mark.parametrize(
    ("params", "found"),
    [({"name": "ma"}, ["mail", "map"]), ({"is_paused": "true"}, ["map"]), ({"is_paused": "false"}, ["low", "mail"])],
)
def test_queues_are_filtered_and_paged_by_name(as_root, params, found):
    QueueFactory(name="mail")
    QueueFactory(name="low")
    QueueFactory(name="map", paused_at=T0)
    assert names(as_root("GET", "queues/", **params)) == found
    first = as_root("GET", "queues/", page_size=1, **params)
    assert names(first) == found[:1]
    if first.data["next"]:
        assert names(as_root("GET", first.data["next"].partition("/api/")[2])) == found[1:2]


def test_a_queue_is_paused_and_resumed(as_root):
    QueueFactory(name="mail")
    assert as_root("POST", "queues/mail/pause/", {"reason": "the relay is down"}).data["is_paused"] is True
    assert Queue.objects.paused().exists()
    assert last_words() == "Paused, through the API: the relay is down"
    assert as_root("POST", "queues/mail/resume/").data["is_paused"] is False
    assert not Queue.objects.paused().exists()
    assert last_words() == "Resumed, through the API"


def test_clearing_a_queue_deletes_its_enqueued_and_blocked_jobs_only(as_root):
    QueueFactory(name="mail")
    for state in ({}, {"blocked": True}, {"scheduled": True}):
        JobFactory(queue="mail", **state)
    JobFactory(queue="other")
    assert as_root("POST", "queues/mail/clear/").data == {"is_done": True}
    assert sorted(Job.objects.values_list("queue", "state")) == [("mail", "scheduled"), ("other", "enqueued")]
    assert not Queue.objects.exists()


def test_a_long_queue_is_cleared_by_several_requests(as_root, root):
    QueueFactory(name="mail")
    Job.objects.bulk_create(JobFactory.many(CHUNK + 1, queue="mail"))

    def clear_one_step():
        request = APIRequestFactory().post("/")
        force_authenticate(request, root)
        return queues.Queues.as_view({"post": "clear"}, clears_for_s=-1)(request, name="mail")

    assert clear_one_step().data == {"is_done": False}
    assert Job.objects.count() == 1
    assert last_words().startswith("Cleared in part")
    assert clear_one_step().data == {"is_done": False}
    assert as_root("POST", "queues/mail/clear/").data == {"is_done": True}


@pytest.mark.parametrize("verb", ["", "pause/", "resume/", "clear/"])
def test_an_unknown_queue_is_not_found(as_root, verb):
    answer = as_root("POST" if verb else "GET", f"queues/typo/{verb}")
    assert answer.status == 404
    assert not Queue.objects.exists()


# --- workers


def test_live_workers_are_listed_with_their_job_counts_and_labels(as_root):
    WorkerFactory(wid="w1", labels=["golang"], queues=["mail"], threads=5)
    WorkerFactory(wid="w2")
    WorkerFactory(wid="gone", seen_at=T0 - timedelta(days=1))
    JobFactory(working=True)
    JobFactory(working=True)
    first, second = as_root("GET", "workers/").data["results"]
    assert (first["wid"], first["jobs"], first["labels"]) == ("w1", 2, ["golang"])
    assert (first["queues"], first["threads"]) == (["mail"], 5)
    assert (second["wid"], second["jobs"], second["queues"], second["threads"]) == ("w2", 0, None, None)
    assert as_root("GET", "workers/w1/").data == first
    assert as_root("GET", "workers/gone/").status == 404


def test_a_worker_is_quieted_then_terminated_and_cannot_return_to_quiet(as_root):
    worker = WorkerFactory(wid="w1")
    assert as_root("POST", "workers/w1/quiet/").data == {"changed": 1}
    assert as_root("POST", "workers/w1/terminate/", {"reason": "too fat"}).data == {"changed": 1}
    assert last_words() == "Sent terminate, through the API: too fat"
    assert as_root("POST", "workers/w1/quiet/").data == {"changed": 0}
    assert WorkerProcess.objects.get(pk=worker.pk).state == "terminate"


# --- batches


def family():
    root = batches.new(Store(), NewBatch(description="root"))
    children = [batches.new(Store(), NewBatch(parent_bid=root)) for _ in range(2)]
    grandchild = batches.new(Store(), NewBatch(parent_bid=children[0]))
    return root, children, grandchild


def test_the_whole_batch_tree_is_returned_for_any_of_its_batches(as_root):
    root, (first, second), grandchild = family()
    for bid in (root, second, grandchild):
        answer = as_root("GET", f"batches/{bid}/tree/")
        assert [(one["bid"], one["depth"]) for one in answer.data["batches"]] == [
            (root, 0),
            (first, 1),
            (grandchild, 2),
            (second, 1),
        ]
        assert answer.data["is_more"] is False


def test_a_batch_lists_its_children_and_members(as_root):
    root, children, _ = family()
    member = JobFactory(dead=True, bid=root)
    JobFactory()
    assert names(as_root("GET", f"batches/{root}/children/"), "bid") == children[::-1]
    assert names(as_root("GET", f"batches/{root}/members/"), "jid") == [member.jid]
    assert as_root("GET", f"batches/{root}/").data["description"] == "root"


def test_batches_are_filtered_by_stage(as_root):
    family()
    Batch.objects.update(expires_at=T0)
    running = Batch.objects.create(bid="running", committed_at=T0)
    failing = Batch.objects.create(bid="failing", committed_at=T0, total=1, pending=1, failed=1)
    over = Batch.objects.create(bid="over", committed_at=T0, finished_at=T0)
    reopened = Batch.objects.create(bid="reopened", committed_at=T0, reopened_until=T0)
    above = Batch.objects.create(bid="above", committed_at=T0, children=1, open_children=1, unsucceeded_children=1)
    below = Batch.objects.create(
        bid="below", committed_at=T0, parent_bid="above", depth=1, total=1, pending=1, failed=1, is_broken=True
    )
    found = {stage: set(names(as_root("GET", "batches/", stage=stage), "bid")) for stage in tree.STAGES}
    assert found["running"] == {failing.bid, running.bid, above.bid, below.bid}
    assert found["failing"] == {failing.bid, above.bid, below.bid}
    assert found["broken"] == {below.bid}
    assert found["over"] == {over.bid}
    assert reopened.bid in found["open"]
    assert len(found["open"]) == 5
    assert as_root("GET", "batches/", stage="nonsense").status == 400


def test_only_failed_jobs_and_callbacks_of_a_batch_are_retried(as_root):
    batch = Batch.objects.create(bid="b-1", committed_at=T0)
    failed = [
        JobFactory(dead=True, bid="b-1"),
        JobFactory(retries=True, bid="b-1"),
        JobFactory(dead=True, callback_of="b-1"),
    ]
    others = [JobFactory(dead=True), JobFactory(scheduled=True, bid="b-1")]
    assert as_root("POST", "batches/b-1/retry/", {"reason": "again"}).data == {"changed": 3}
    assert set(Job.objects.enqueued()) == set(failed)
    assert not set(Job.objects.enqueued()) & set(others)
    assert LogEntry.objects.get().object_id == str(batch.pk)


def test_a_limited_retry_of_a_batch_continues_when_repeated():
    root, (first, _), grandchild = family()
    for bid in (root, first, grandchild, grandchild):
        JobFactory(dead=True, bid=bid)
    assert [bulk.retry_batches([root], using="default", limit=3) for _ in range(3)] == [3, 1, 0]
    assert Job.objects.enqueued().count() == 4


# --- cron


def test_a_cron_entry_is_created_edited_and_deleted(as_root):
    made = as_root("POST", "cron/", CRON | {"reason": "new"})
    assert made.status == 201
    assert (made.data["origin"], made.data["state"], made.data["window"]) == ("admin", "active", 86_400)
    assert len(made.data["next_times"]) == 5
    changed = as_root("PATCH", "cron/mine/", {"schedule": "5 2 * * *", "args": [3, 4]})
    assert (changed.data["schedule"], changed.data["args"], changed.data["zone"]) == (
        "5 2 * * *",
        [3, 4],
        "Europe/Berlin",
    )
    assert changed.data["next_at"] == changed.data["next_times"][0]
    assert as_root("DELETE", "cron/mine/", reason="no longer needed").status == 204
    assert not CronEntry.objects.exists()
    assert [entry.change_message for entry in LogEntry.objects.order_by("pk")] == [
        "Written, through the API: new",
        "Edited args, schedule, through the API",
        "Deleted, through the API: no longer needed",
    ]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"schedule": "61 * * * *"}, "schedule"),
        ({"zone": "Mars/Olympus"}, "zone"),
        ({"args": [1]}, "args"),
        ({"args": "x"}, "args"),
        ({"window": 10**40}, "window"),
        ({"missed": "perhaps"}, "missed"),
        ({"queue": "a b"}, "queue"),
        ({"job": {"retry": 3}}, "job"),
        ({"jobtype": "elsewhere", "args": [], "kwargs": {"a": 1}}, "kwargs"),
        ({"jobtype": "elsewhere", "args": [], "job": {"nonsense": 3}}, "job.nonsense"),
        ({"name": "a\nb"}, "name"),
        ({"name": ""}, "name"),
    ],
    ids=str,
)
def test_an_invalid_cron_entry_is_rejected_with_its_field(as_root, wrong, field):
    answer = as_root("POST", "cron/", CRON | wrong)
    assert (answer.status, [one["field"] for one in answer.data["errors"]]) == (400, [field])
    assert not CronEntry.objects.exists()


def test_a_duplicate_cron_entry_name_is_a_conflict(as_root):
    assert as_root("POST", "cron/", CRON).status == 201
    assert as_root("POST", "cron/", CRON).status == 409
    assert CronEntry.objects.count() == 1


def test_a_cron_entry_defined_in_code_cannot_be_changed(as_root):
    CronFactory(name="code", origin="code", schedule="* * * * *", jobtype=add.jobtype)
    assert as_root("PATCH", "cron/code/", {"schedule": "5 2 * * *"}).status == 409
    assert as_root("DELETE", "cron/code/").status == 409
    assert CronEntry.objects.get().schedule == "* * * * *"
    CronEntry.objects.update(removed_at=T0)
    assert as_root("POST", "cron/code/run/").status == 409
    assert as_root("DELETE", "cron/code/").status == 204


def test_a_cron_entry_is_paused_resumed_and_run(as_root):
    as_root("POST", "cron/", CRON)
    assert as_root("POST", "cron/mine/pause/").data["state"] == "paused"
    jid = as_root("POST", "cron/mine/run/", {"reason": "month's end"}).data["jid"]
    assert '"args":[1,2]' in Job.objects.get(jid=jid).payload
    assert last_words() == "Run manually, through the API: month's end"
    assert as_root("POST", "cron/mine/resume/").data["state"] == "active"
    [listed] = as_root("GET", "cron/").data["results"]
    assert (listed["latest"]["jid"], listed["latest"]["outcome"], listed["latest"]["tick"]) == (jid, "enqueued", None)


def test_a_cron_entry_may_have_a_slash_in_its_name(as_root):
    as_root("POST", "cron/", CRON | {"name": "reports/daily"})
    assert as_root("GET", "cron/reports/daily/").data["name"] == "reports/daily"
    assert as_root("POST", "cron/reports/daily/pause/").data["state"] == "paused"
    assert CronRun.objects.count() == 0


# --- locks


def test_locks_are_listed_and_released(as_root):
    held, _ = LockFactory(key="order/42"), LockFactory(key="order/43", wid="w2")
    assert names(as_root("GET", "locks/"), "key") == ["order/43", "order/42"]
    assert names(as_root("GET", "locks/", key="order/42"), "token") == [held.pk]
    assert names(as_root("GET", "locks/", worker="w1"), "token") == [held.pk]
    assert as_root("POST", f"locks/{held.pk}/release/", {"reason": "stuck"}).data == {"changed": 1}
    assert last_words() == "Released manually, through the API: stuck"
    assert list(JobLock.objects.values_list("key", flat=True)) == ["order/43"]


@pytest.mark.parametrize("token", ["9" * 18, "9" * 30, "0", "x", "-1"])
def test_an_unknown_lock_is_not_found(as_root, token):
    assert as_root("GET", f"locks/{token}/").status == 404


# --- limits


def test_limits_are_created_changed_and_deleted(as_root):
    made = as_root("POST", "limits/", {"scope": "task", "name": "noop", "rate": "10/m", "burst": 3, "reason": "API"})
    assert made.status == 201
    assert last_words() == "Written, through the API: API"
    assert as_root("POST", "limits/", {"scope": "task", "name": "noop", "concurrency": 1}).status == 409
    where = f"limits/{made.data['id']}/"
    assert [made.data[field] for field in ("concurrency", "rate", "burst", "origin")] == [None, "10/m", 3, "admin"]
    assert as_root("PUT", where, {"concurrency": 2}).data["rate"] is None
    assert last_words() == "Edited: 2 at a time, through the API"
    assert names(as_root("GET", "limits/", scope="task")) == ["noop"]
    assert names(as_root("GET", "limits/", scope="queue")) == []
    assert as_root("DELETE", where).status == 204
    assert as_root("GET", where).status == 404


def test_deleting_a_limit_of_code_says_that_it_returns(as_root):
    made = as_root("POST", "limits/", {"scope": "task", "name": "noop", "concurrency": 1})
    Limit.objects.update(origin="code")
    answer = as_root("DELETE", f"limits/{made.data['id']}/")
    assert (answer.status, "returns when a node starts" in answer.data["detail"]) == (200, True)
    assert not Limit.objects.exists()


@pytest.mark.parametrize(
    "body",
    [
        {}, {"rate": "fast"}, {"burst": 2}, {"concurrency": 0}, {"concurrency": "x"}, {"rate": "5/s", "burst": -1},
        {"scope": "worker", "concurrency": 1}, {"scope": "queue", "name": "a b", "concurrency": 1},
        {"name": "", "concurrency": 1},
    ],
)  # fmt: skip
def test_an_invalid_limit_is_rejected(as_root, body):
    assert as_root("POST", "limits/", {"scope": "task", "name": "noop"} | body).status == 400
    assert names(as_root("GET", "limits/")) == []


def test_tasks_are_paused_and_resumed(as_root):
    assert as_root("POST", "limits/pause/", {"tasks": ["noop", "add"], "reason": "broken"}).data == {
        "tasks": ["add", "noop"]
    }
    assert last_words() == "Paused, through the API: broken"
    assert [one["is_paused"] for one in as_root("GET", "limits/").data["results"]] == [True, True]
    assert as_root("POST", "limits/resume/", {"tasks": ["noop"]}).data == {"tasks": ["noop"]}
    assert names(as_root("GET", "limits/")) == ["add"]


# --- statistics and alarms


def test_alarms_are_listed_with_their_age_and_advice(as_root):
    began = timezone.now() - timedelta(minutes=5)
    JobFactory(queue="mail", enqueued_at=began)
    [alarm] = as_root("GET", "alarms/").data
    assert (alarm["kind"], alarm["is_critical"], alarm["affected"]) == ("no-workers", True, 1)
    assert alarm["since"][:16] == began.astimezone(UTC).isoformat()[:16]


def test_statistics_report_sets_workers_and_batches(as_root):
    JobFactory(dead=True)
    JobFactory()
    WorkerFactory()
    figures = as_root("GET", "statistics/").data
    assert (figures["sets"]["dead"], figures["sets"]["enqueued"], figures["workers"]["running"]) == (1, 1, 1)
    assert figures["batches"] == {"open": 0, "committed": 0}
