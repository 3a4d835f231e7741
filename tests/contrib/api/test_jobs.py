"""Jobs through the API: search by query language, enqueue, edit, and actions on one job or many."""

import json
from base64 import b64encode
from datetime import timedelta
from urllib.parse import urlencode

import pytest
from django.contrib.admin.models import LogEntry

from django_faktory.core.steps import FOREVER
from django_faktory.models import Job, JobQuerySet, JobSignal
from django_faktory.operations.job_actions import Verb
from tests.factories import T0, JobFactory
from tests.project.tasks import add, once_a_group, send_invoice

pytestmark = [pytest.mark.once, pytest.mark.django_db]


def job_in(state, **fields):
    return JobFactory(**({state: True} if state != "enqueued" else {}), **fields)


def found(answer):
    assert answer.status == 200, answer
    return [job["jid"] for job in answer.data["results"]]


def test_jobs_are_listed_newest_first_and_paginated(as_root):
    jids = [job_in("dead").jid for _ in range(5)]
    first = as_root("GET", "jobs/", page_size=2)
    assert found(first) == jids[:2:-1]
    second = as_root("GET", first.data["next"].partition("/api/")[2])
    assert found(second) == [jids[2], jids[1]]
    assert found(as_root("GET", second.data["previous"].partition("/api/")[2])) == jids[:2:-1]


def test_failed_jobs_are_listed_by_their_failure_also_across_pages(as_root):
    """Jobs that one statement killed have the same time."""
    hours = [2, 9, 5, 5, 5, 5, 1]
    jids = [job_in("dead", failed_at=T0 + timedelta(hours=hour)).jid for hour in hours]
    expected = [jids[place] for place in (1, 5, 4, 3, 2, 0, 6)]
    pages = [as_root("GET", "jobs/", page_size=2, state="dead")]
    while following := pages[-1].data["next"]:
        pages.append(as_root("GET", following.partition("/api/")[2]))
    assert [jid for page in pages for jid in found(page)] == expected
    back = as_root("GET", pages[2].data["previous"].partition("/api/")[2])
    assert found(back) == found(pages[1])
    forged = b64encode(b"p=2026-02-30 00:00:00/1").decode()
    assert as_root("GET", "jobs/", state="dead", cursor=forged).status == 400
    first_of_all = as_root("GET", "jobs/", page_size=2).data["next"].rpartition("cursor=")[2].partition("&")[0]
    assert as_root("GET", f"jobs/?state=dead&cursor={first_of_all}").status == 400


@pytest.mark.parametrize(
    "params",
    [
        {"query": "dead queue:mail error:Timeout"},
        {"state": "dead", "queue": "mail"},
        {"query": "queue:mail", "state": "dead,retries"},
        {"task": "shop.*", "error": "Timeout"},
        {"about": "shop.order/42"},
        {"batch": "b-1"},
        {"older": "1d", "state": "dead"},
        {"failed_before": "1h"},
        {"failed_after": "2026-05-01", "failed_before": "2026-05-02"},
    ],
    ids=str,
)
def test_jobs_are_filtered_by_query_and_by_single_parameters(as_root, params):
    wanted = job_in(
        "dead", queue="mail", jobtype="shop.send", errtype="requests.Timeout", about="shop.order/42", bid="b-1"
    )
    job_in("enqueued", queue="low")
    assert found(as_root("GET", "jobs/", **params)) == [wanted.jid]


@pytest.mark.parametrize(
    ("params", "field", "position"),
    [
        ({"query": "dead  nonsense:1"}, "query", 6),
        ({"query": "dead queue:"}, "query", 11),
        ({"query": 'queue:"a" state:gone'}, "query", 10),
        ({"state": "dead,gone"}, "state", 0),
        ({"queue": "mail task:shop"}, "queue", None),
        ({"query": "dead", "state": "retries"}, "state", None),
        ({"query": "text:\u202e"}, "query", 5),
    ],
    ids=str,
)
def test_an_invalid_query_is_rejected_with_the_field_and_position(as_root, params, field, position):
    answer = as_root("GET", "jobs/", **params)
    assert answer.status == 400
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.data["type"] == "urn:django-faktory:problem:invalid-query"
    assert answer.data["position"] == position
    assert answer.data["errors"] == [{"field": field, "detail": answer.data["detail"]}]


@pytest.mark.parametrize("params", [{"query": "a\x00b"}, {"queue": "\x00"}, {"cursor": "x"}, {"query": "a" * 5000}])
def test_an_invalid_parameter_value_is_rejected_with_its_field(as_root, params):
    answer = as_root("GET", "jobs/", **params)
    assert (answer.status, answer.data["type"]) == (400, "urn:django-faktory:problem:invalid")
    assert [one["field"] for one in answer.data["errors"]] == list(params)


@pytest.mark.parametrize("position", ["x", "-1", "9" * 30, "1.5", "\x00", "\ud800", "²"])
def test_a_forged_cursor_is_rejected(as_root, position):
    job_in("dead")
    query = urlencode({"p": position}, errors="surrogatepass")
    answer = as_root("GET", "jobs/", cursor=b64encode(query.encode()).decode())
    assert answer.status == 400
    assert answer.data["errors"][0]["field"] == "cursor"


def test_a_job_is_returned_with_its_complete_payload(as_root):
    payload = '{"jid":"x", "args":[12345678901234567890123,\t1.0,\r\n"\\ud800","\u20ac\u202e\U0001f600",1e999]}'
    job = job_in("dead", jid="a job+ü.1", payload=payload, result="[1.50]")
    answer = as_root("GET", "jobs/a%20job+%C3%BC.1/")
    assert answer.data["jid"] == job.jid
    as_sent = rb'"job": {"jid":"x", "args":[12345678901234567890123, 1.0,  "\ud800","\u20ac\u202e\ud83d\ude00",1e999]}'
    assert as_sent in answer.text
    assert b'"result": [1.50]' in answer.text


@pytest.mark.parametrize("payload", ["", "no JSON", '{"args":[NaN]}', '{"args":[1]}}', "\ufeff{}"])
def test_a_text_of_a_job_that_is_no_json_is_returned_as_a_string(as_root, payload):
    """Somebody has edited the row."""
    job_in("dead", jid="job-edited", payload=payload)
    assert as_root("GET", "jobs/job-edited/").data["job"] == payload


@pytest.mark.parametrize("jid", ["no-such-job", "x" * 300, "a%00b", "%F0%9F", "%0A"])
def test_an_unknown_job_is_not_found(as_root, jid):
    answer = as_root("GET", f"jobs/{jid}/")
    assert (answer.status, answer.headers["Content-Type"]) == (404, "application/problem+json")
    assert answer.data["instance"].startswith("/api/jobs/")


def test_a_single_job_is_returned_regardless_of_its_age(as_root, monkeypatch):
    """Lists without an index show recent jobs only; this must not apply to a single job."""
    monkeypatch.setattr(JobQuerySet, "recent", lambda self, count=0: self.none())
    job = job_in("succeeded")
    assert as_root("GET", f"jobs/{job.jid}/").status == 200
    assert as_root("GET", "jobs/", queue="default").data["results"] == []


# --- enqueueing


def test_a_registered_task_is_enqueued_with_its_arguments_and_options(as_root, root):
    answer = as_root(
        "POST",
        "jobs/",
        {
            "task": send_invoice.jobtype,
            "args": [7],
            "queue": "later",
            "priority": 40,
            "run_after": "2040-05-01T12:00:00+02:00",
            "about": "shop.order/42",
            "reason": "the customer asked",
        },
    )
    assert answer.status == 201
    job = Job.objects.get(jid=answer.data["jid"])
    assert (job.state, job.queue, job.priority, job.about) == ("scheduled", "later", 40, "shop.order/42")
    assert job.run_at.isoformat() == "2040-05-01T10:00:00+00:00"
    assert '"args":[7]' in job.payload
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_id, entry.action_flag) == (root, str(job.pk), 1)
    assert entry.change_message == "Enqueued, through the API: the customer asked"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"task": "os.system", "args": ["true"]}, None),
        ({"task": add.jobtype, "args": [1]}, None),
        ({"task": add.jobtype, "args": [1, 2, 3]}, None),
        ({"task": add.jobtype, "args": {"a": 1}}, "args"),
        ({"task": add.jobtype, "kwargs": [1]}, "kwargs"),
        ({"task": add.jobtype, "args": [1, 2], "priority": 10**30}, "priority"),
        ({"task": add.jobtype, "args": [1, 2], "queue": "a/b"}, "queue"),
        ({"task": add.jobtype, "args": [1, 2], "queue": "a\nb"}, "queue"),
        ({"task": add.jobtype, "args": [1, 2], "run_after": "9999-12-31T23:59:59-23:59"}, "run_after"),
        ({"task": add.jobtype, "args": [1, 2], "run_after": "0001-01-01T00:00:00+14:00"}, "run_after"),
        ({"task": add.jobtype, "args": [1, 2], "about": "nothing"}, "about"),
        ({"task": "a\x00b"}, "task"),
        ({"task": "\ud800"}, "task"),
        ({}, "task"),
    ],
    ids=lambda value: str(value).encode("unicode_escape").decode() if isinstance(value, dict) else "",
)
def test_an_invalid_enqueue_request_is_rejected_and_stores_nothing(as_root, body, field):
    answer = as_root("POST", "jobs/", body)
    assert answer.status == 400, answer.data
    assert [one["field"] for one in answer.data.get("errors", [{"field": None}])] == [field]
    assert not Job.objects.exists()
    assert not LogEntry.objects.exists()


def test_a_second_unique_job_is_a_conflict(as_root):
    body = {"task": once_a_group.jobtype, "args": ["a"]}
    assert as_root("POST", "jobs/", body).status == 201
    answer = as_root("POST", "jobs/", body)
    assert (answer.status, answer.data["type"]) == (409, "urn:django-faktory:problem:not-unique")
    assert Job.objects.count() == 1


@pytest.mark.parametrize(
    "body",
    ["[" * 100_000, '{"task":NaN}', "[]", "1" * 5000, '{"a', "\x00", '"x"', '{"args":[' + "[" * 500],
    ids=range(8),
)
def test_a_body_that_is_not_a_json_object_is_rejected(as_root, body):
    assert as_root("POST", "jobs/", body).status == 400


def test_too_deeply_nested_arguments_are_rejected(as_root):
    deep = "[" * 200 + "]" * 200
    answer = as_root("POST", "jobs/", f'{{"task":"{add.jobtype}","args":[1,{deep}]}}')
    assert answer.status == 400
    assert "nested deeper" in answer.data["detail"]


def test_a_body_longer_than_the_maximum_command_is_rejected(as_root, settings):
    settings.FAKTORY = {"MAX_COMMAND_BYTES": 100}
    answer = as_root("POST", "jobs/", {"task": add.jobtype, "args": ["x" * 100, 1]})
    assert (answer.status, answer.data["title"]) == (413, "Too large")


# --- actions


@pytest.mark.parametrize(
    ("verb", "state", "becomes"),
    [
        ("retry", "dead", "enqueued"),
        ("retry", "scheduled", 409),
        ("requeue", "scheduled", "enqueued"),
        ("restart", "dead", "enqueued"),
        ("requeue", "working", 409),
        ("kill", "retries", "dead"),
        ("kill", "working", 409),
        ("discard", "dead", None),
        ("discard", "succeeded", 409),
        ("prune", "succeeded", None),
        ("prune", "enqueued", 409),
        ("cancel", "scheduled", None),
        ("cancel", "working", "working"),
        ("cancel", "dead", 409),
    ],
)
def test_an_action_changes_a_job_or_conflicts_depending_on_its_state(as_root, root, verb, state, becomes):
    job = job_in(state)
    answer = as_root("POST", f"jobs/{job.jid}/{verb}/", {"reason": "on call"})
    if becomes == 409:
        assert answer.status == 409
        assert state in answer.data["detail"]
        assert Job.objects.get().state == state
        assert not LogEntry.objects.exists()
        return
    assert (answer.status, answer.data) == (200, {"changed": 1, "state": becomes})
    row = Job.objects.filter(pk=job.pk).first()
    assert (row.state if row else None) == becomes
    assert row is None or row.is_cancelled == (verb == "cancel")
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_id, entry.object_repr) == (root, str(job.pk), f"noop {job.jid}")
    assert entry.change_message.endswith(", through the API: on call")


def test_a_signal_ends_the_wait_of_a_job_and_its_reason_is_recorded(as_root):
    job = JobFactory(state="scheduled", run_at=FOREVER, enqueued_at=None, waits_for="approved")
    shown = as_root("GET", f"jobs/{job.jid}/").data
    assert (shown["waits_for"], shown["run_at"], shown["waiting_reason"]["kind"]) == ("approved", None, "signal")
    body = {"name": "approved", "payload": {"by": "ann"}, "reason": "asked me"}
    answer = as_root("POST", f"jobs/{job.jid}/signal/", body)
    assert (answer.status, answer.data["jid"]) == (200, job.jid)
    assert JobSignal.objects.get().payload == '{"by":"ann"}'
    assert LogEntry.objects.get().change_message.endswith("Sent signal approved, through the API: asked me")
    assert as_root("POST", f"jobs/{job.jid}/signal/", {"name": ""}).status == 400
    ended = job_in("succeeded")
    answer = as_root("POST", f"jobs/{ended.jid}/signal/", {"name": "approved"})
    assert (answer.status, "cannot take a signal" in answer.data["detail"]) == (409, True)


def test_a_bulk_action_processes_matching_jobs_in_bounded_portions(as_root):
    dead = [job_in("dead", queue="mail").pk for _ in range(5)]
    other = job_in("dead")
    body = {"query": "state:dead queue:mail", "limit": 2, "reason": "the relay is back"}
    answers_, after = [], None
    while True:
        answer = as_root("POST", "jobs/bulk/retry/", body | ({"after": after} if after else {}))
        answers_.append((answer.data["found"], answer.data["changed"]))
        if after is None:
            job_in("dead", queue="mail")  # added later, so the action leaves it alone
        after = answer.data["next"]
        if after is None:
            break
    assert answers_ == [(2, 2), (2, 2), (1, 1)]
    assert set(Job.objects.enqueued().values_list("pk", flat=True)) == set(dead)
    assert Job.objects.get(pk=other.pk).state == "dead"
    assert [entry.change_message for entry in LogEntry.objects.order_by("pk")] == [
        f"Retried {count} jobs, through the API: the relay is back" for count in (2, 2, 1)
    ]
    assert {entry.object_repr for entry in LogEntry.objects.all()} == {"state:dead queue:mail"}


def test_a_bulk_action_terminates_if_changed_jobs_still_match(as_root):
    for _ in range(3):
        job_in("dead")
    seen, after = 0, None
    for _ in range(5):
        answer = as_root("POST", "jobs/bulk/kill/", {"query": "dead", "limit": 2} | ({"after": after} if after else {}))
        seen, after = seen + answer.data["changed"], answer.data["next"]
        if after is None:
            break
    assert (seen, after) == (3, None)


@pytest.mark.parametrize("verb", Verb)
def test_a_dry_run_counts_matching_jobs_and_changes_none(as_root, verb):
    state = "enqueued" if verb is Verb.CANCEL else "dead"
    job_in(state)
    answer = as_root("POST", f"jobs/bulk/{verb}/", {"query": state, "dry_run": True})
    assert answer.data == {"query": f"state:{state}", "found": 1, "changed": 0, "next": None}
    assert Job.objects.get().state == state
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"query": ""},
        {"query": "among:5"},
        {"query": "dead", "limit": 10**30},
        {"query": "dead", "limit": 0},
        {"query": "dead", "after": "1"},
        {"query": "dead", "per_minute": 10},
        {"like": "no such job"},
        {"query": "dead", "like": "no such job"},
        {"query": "queue:\x00"},
        {"query": "dead", "dry_run": "perhaps"},
        {"query": ["dead"]},
        {"query": "dead " * 1000},
    ],
    ids=str,
)
def test_an_invalid_bulk_action_is_rejected_and_changes_nothing(as_root, body):
    job_in("dead")
    assert as_root("POST", "jobs/bulk/kill/", body).status == 400
    assert Job.objects.get().state == "dead"


def test_a_bulk_retry_spreads_its_jobs_over_all_parts_at_its_pace(as_root):
    for _ in range(5):
        job_in("dead")
    answer = as_root("POST", "jobs/bulk/retry/", {"query": "dead", "limit": 2, "per_minute": 30})
    while after := answer.data["next"]:
        answer = as_root("POST", "jobs/bulk/retry/", {"limit": 2, "after": after})
    times = list(Job.objects.retries().order_by("pk").values_list("run_at", flat=True))
    assert [time - times[0] for time in times] == [timedelta(seconds=2 * place) for place in range(5)]


def test_a_bulk_retry_of_jobs_that_failed_like_one_takes_only_these(as_root):
    def failed(message, **fields):
        failure = json.dumps({"message": message, "backtrace": []}, separators=(",", ":"))
        return job_in("dead", errtype="E", failure=failure, **fields)

    alike, others = (
        [failed(f"order {number}") for number in range(3)],
        [failed("other"), failed("order 1", jobtype="x")],
    )
    body = {"like": alike[0].jid, "dry_run": True}
    assert as_root("POST", "jobs/bulk/retry/", body).data["found"] == 3
    first = as_root("POST", "jobs/bulk/retry/", {"like": alike[0].jid, "limit": 2}).data
    assert (first["query"], first["changed"]) == ("", 2)
    assert as_root("POST", "jobs/bulk/retry/", {"after": first["next"]}).data["changed"] == 1
    assert set(Job.objects.dead()) == set(others)
    assert as_root("POST", "jobs/bulk/prune/", body).status == 400


def test_the_next_part_of_a_bulk_action_belongs_to_its_user_verb_and_query(api, as_root, user):
    for _ in range(2):
        job_in("dead")
    after = as_root("POST", "jobs/bulk/kill/", {"query": "dead", "limit": 1}).data["next"]
    other = user("view_job", "kill_job")
    for verb, body, by in (("discard", {}, None), ("kill", {"query": "retries"}, None), ("kill", {}, other)):
        answer = api("POST", f"jobs/bulk/{verb}/", {**body, "after": after}, by=by)
        assert (answer.status, answer.data["errors"][0]["field"]) == (400, "after")
    assert Job.objects.dead().count() == 2


def test_like_needs_permission_to_view_jobs(api, user):
    job = job_in("dead")
    answer = api("POST", "jobs/bulk/retry/", {"like": job.jid}, by=user("retry_job"))
    assert (answer.status, Job.objects.get().state) == (403, "dead")


# --- editing


def test_editing_a_dead_job_is_recorded_in_the_admin_log(as_root, root):
    job = job_in("dead", jobtype=add.jobtype)
    answer = as_root(
        "PATCH", f"jobs/{job.jid}/", {"args": [1, 2], "queue": "low", "priority": -10, "reason": "wrong sum"}
    )
    assert answer.status == 200, answer.data
    assert answer.data["job"]["args"] == [1, 2]
    assert (answer.data["queue"], answer.data["priority"], answer.data["state"]) == ("low", -10, "dead")
    entry = LogEntry.objects.get()
    assert entry.change_message == "Edited args, priority, queue, through the API: wrong sum"


@pytest.mark.parametrize("state", ["working", "succeeded", "discarded", "expired"])
def test_a_running_or_finished_job_cannot_be_edited(as_root, state):
    job = job_in(state)
    answer = as_root("PATCH", f"jobs/{job.jid}/", {"queue": "low"})
    assert answer.status == 409
    assert Job.objects.get().queue == "default"
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize(
    ("state", "body", "status"),
    [
        ("dead", {}, 400),
        ("dead", {"reason": "no change"}, 400),
        ("dead", {"run_after": "2040-01-01T00:00:00Z"}, 409),
        ("dead", {"args": [1, 2, 3]}, 400),
        ("dead", {"args": "x"}, 400),
        ("dead", {"kwargs": {"c": 1}}, 400),
        ("dead", {"queue": "a b"}, 400),
        ("dead", {"priority": 101}, 400),
        ("scheduled", {"run_after": "soon"}, 400),
        ("scheduled", {"run_after": None}, 400),
    ],
    ids=str,
)
def test_an_invalid_edit_is_rejected(as_root, state, body, status):
    job = job_in(state, jobtype=add.jobtype)
    answer = as_root("PATCH", f"jobs/{job.jid}/", body)
    assert answer.status == status, answer.data
    assert Job.objects.get().payload == job.payload
