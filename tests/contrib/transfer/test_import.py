"""Test `manage.py faktory import-faktory`: no job is lost or doubled, and jobs that stay are reported."""

import json
from datetime import UTC, datetime
from io import StringIO

import pytest
from django.core.management import call_command

from django_faktory.admin.jobs.detail import build_timeline
from django_faktory.brokers import get_broker
from django_faktory.contrib.transfer import import_jobs
from django_faktory.contrib.transfer.redis_layout import FaktoryRedis
from django_faktory.core.payloads import Ack, FetchRequest
from django_faktory.errors import BrokerUnavailable
from django_faktory.models import Job, Queue
from django_faktory.operations.serializers import whole_job_of
from django_faktory.store import texts
from django_faktory.store import transfer as store
from tests.contrib.transfer.conftest import RECORDED, jids, load, raw, recorded
from tests.factories import JobFactory
from tests.management.cli.test_documented import documented, shape

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]

EVERY = pytest.mark.parametrize("release", sorted(RECORDED))
STATES = {
    "jid-mail0": "enqueued",
    "jid-mail1": "enqueued",
    "jid-mail2": "enqueued",
    "jid-mail3": "enqueued",
    "jid-mail4": "enqueued",
    "jid-default": "enqueued",
    "jid-held": "enqueued",
    "jid-again": "enqueued",
    "jid-later": "scheduled",
    "jid-working": "scheduled",
    "jid-retry": "retries",
    "jid-dead": "dead",
}


@pytest.fixture
def take(asked, server):
    """Return a function that imports all jobs and returns the JSON answer."""

    def run(*options, code=0):
        return asked("import-faktory", server.url, "--yes", *options, code=code)

    return run


def states():
    return dict(Job.objects.values_list("jid", "state"))


def fetched(*queues, count=10):
    [found] = get_broker().fetch([FetchRequest(queues=queues, wid="w1", count=count)])
    return [job.jid for job in found]


@EVERY
def test_all_of_a_real_faktory_is_imported_in_its_states_and_order(release, redis, take):
    load(redis, recorded(release))
    report = take()
    assert states() == STATES
    assert report["layout"] == release.rpartition(".")[0]
    assert (report["found"], report["moved"], report["left"], report["problems"]) == (12, 12, 0, [])
    places = {"default": 1, "mail": 5, "halted": 1, "work": 1, "scheduled": 1, "retries": 1, "dead": 1, "working": 1}
    assert {one["name"]: one["moved"] for one in report["places"]} == places
    assert [one["kind"] for one in report["places"]].count("queue") == 4
    assert {key for key in redis.scan_iter() if redis.type(key) in (b"list", b"zset")} == set()
    redis.close()
    assert report["paused"] == ["halted"]
    assert fetched("halted") == []
    assert fetched("mail") == [f"jid-mail{n}" for n in range(5)]
    assert set(Queue.objects.values_list("name", flat=True)) >= {"default", "mail", "halted", "work", "work2"}


@EVERY
def test_times_and_failures_are_imported(release, redis, take):
    found = recorded(release)
    load(redis, found)
    take()
    rows = {job.jid: job for job in Job.objects.all()}
    score = {key: found[key][1][0][1] for key in ("retries", "dead", "working")}
    assert rows["jid-later"].run_at == datetime(2090, 1, 1, 0, 0, 0, 123456, UTC)
    assert rows["jid-retry"].run_at.timestamp() == pytest.approx(score["retries"], abs=1e-5)
    assert rows["jid-dead"].purge_at.timestamp() == pytest.approx(score["dead"], abs=1e-5)
    assert rows["jid-working"].run_at.timestamp() == pytest.approx(score["working"], abs=1e-5)
    for jid in ("jid-retry", "jid-dead", "jid-again"):
        assert (rows[jid].failures, rows[jid].errtype) == (1, "OSError")
        assert json.loads(rows[jid].failure)["backtrace"] == ["a", "b"]
        assert rows[jid].failed_at is not None
    assert rows["jid-dead"].failed_at == rows["jid-dead"].finished_at
    assert (rows["jid-default"].retry, rows["jid-default"].reserve_for) == (3, 90)
    assert json.loads(rows["jid-mail0"].payload)["args"] == [1, "ü"]
    assert json.loads(rows["jid-mail3"].payload)["custom"] == {"trace": 3}


def timeline_of(job):
    return build_timeline(job, texts.read(job, "history")["history"])


@EVERY
def test_the_error_of_an_imported_job_is_shown_as_its_latest_attempt(release, redis, take):
    load(redis, recorded(release))
    take()
    job = Job.objects.get(jid="jid-dead")
    [attempt] = whole_job_of(job)["attempts"]
    failure = json.loads(job.failure)
    assert (attempt["errtype"], attempt["message"]) == ("OSError", failure["message"])
    assert (attempt["backtrace"], attempt["failed_at"]) == (["a", "b"], failure["failed_at"])
    [moment] = [one for one in timeline_of(job) if one.is_failed and one.error]
    assert (moment.title, moment.error, moment.backtrace) == ("Attempt 1 failed", "OSError", "a\nb")
    out = StringIO()
    call_command("faktory", "job", job.jid, stdout=out)
    assert f"OSError: {failure['message']}" in out.getvalue()


def test_only_the_latest_failure_of_an_imported_job_is_known(redis, take):
    failure = {"failed_at": "2026-01-01T00:00:00Z", "errtype": "E", "message": "no", "retry_count": 2, "remaining": 23}
    load(redis, {"retries": ["zset", [[raw("a", failure=failure), 3_786_912_000]]]})
    take()
    job = Job.objects.get()
    assert [one.title for one in timeline_of(job)] == [
        "Enqueued", "2 earlier attempts", "Attempt 3 failed", "Next retry at",
    ]  # fmt: skip
    assert whole_job_of(job)["attempts"][0]["failed_at"] is None  # Faktory stores that of the first failure


@pytest.mark.parametrize("failure", [{}, {"message": 5, "backtrace": "text", "failed_at": 7}, {"backtrace": [1, "a"]}])
def test_a_failure_with_odd_members_is_imported_and_shown(failure, redis, take):
    load(redis, {"dead": ["zset", [[raw("a", failure=failure), 3_786_912_000]]]})
    take()
    job = Job.objects.get()
    assert [one["errtype"] for one in whole_job_of(job)["attempts"]] == ["unknown"]
    assert timeline_of(job)


def test_a_running_job_with_earlier_failures_is_imported_as_a_retry(redis, take):
    failure = {"failed_at": "2026-01-01T00:00:00Z", "errtype": "E", "retry_count": 2, "remaining": 23}
    reservation = {"job": json.loads(raw("a", failure=failure)), "expires_at": "2090-01-01T00:00:00Z", "wid": "w"}
    load(redis, {"working": ["zset", [[json.dumps(reservation), 3_786_912_000]]]})
    take()
    job = Job.objects.get()
    assert (job.state, job.failures, job.run_at) == ("retries", 3, datetime(2090, 1, 1, tzinfo=UTC))


def test_due_retries_and_scheduled_jobs_are_imported_as_enqueued(redis, take):
    failure = {"failed_at": "2026-01-01T00:00:00Z", "errtype": "E", "retry_count": 0, "remaining": 25}
    load(redis, {"retries": ["zset", [[raw("a", failure=failure), 1000]]], "scheduled": ["zset", [[raw("b"), 1000]]]})
    take()
    assert states() == {"jid-a---": "enqueued", "jid-b---": "enqueued"}
    assert Job.objects.get(jid="jid-a---").failures == 1


@pytest.mark.parametrize("name", ["paused", "queues"])
def test_a_queue_of_1_9_named_like_a_key_is_imported(name, redis, take):
    load(redis, {name: ["list", [raw("a", name)]]})
    assert take()["moved"] == 1
    assert fetched(name) == ["jid-a---"]


def test_a_1_9_list_left_behind_by_1_10_is_imported_too(redis, take):
    load(redis, {"q:mail": ["list", [raw("new", "mail")]], "mail": ["list", [raw("old", "mail")]]})
    assert take()["layout"] == "1.9 and 1.10"
    assert fetched("mail") == ["jid-old-", "jid-new-"]


def test_the_answer_has_the_documented_shape(redis, take):
    JobFactory(jid="jid-a---")
    load(redis, {"q:mail": ["list", [raw("a", "mail")]], "paused": ["set", ["mail"]], "processed": ["string", "7"]})
    assert shape(take(code=4)) == shape(documented("import-faktory"))


def test_a_second_import_finds_no_jobs(redis, take):
    load(redis, recorded("1.10.0"))
    take()
    assert take("--dry-run")["found"] == 0
    assert states() == STATES


def test_importing_from_an_empty_redis_exits_with_code_2(redis, take):
    assert take(code=2)["found"] == 0


def test_a_queue_longer_than_one_chunk_is_imported_in_order(redis, take):
    names = [f"{n:04}" for n in range(store.CHUNK + 2)]
    load(redis, {"queues": ["set", ["mail"]], "mail": ["list", [raw(name, "mail") for name in reversed(names)]]})
    assert take()["moved"] == len(names)
    assert fetched("mail", count=len(names)) == [f"jid-{name}" for name in names]


def test_a_dry_run_reports_the_same_and_changes_nothing(redis, take):
    found = recorded("1.10.0")
    load(redis, found)
    dry = take("--dry-run")
    assert (Job.objects.count(), Queue.objects.count()) == (0, 0)
    assert set(jids(redis, "q:mail", "dead")) == {"jid-dead", *(f"jid-mail{n}" for n in range(5))}
    assert dry == take() | {"dry_run": True}


class BreaksOff(Exception):
    pass


def broken_off(redis_server, monkeypatch, *, method, times=0):
    """Run an import in which this method of `FaktoryRedis` fails after `times` successful calls."""
    left, real = [times], getattr(FaktoryRedis, method)

    def fails(self, *arguments):
        if not left[0]:
            raise BreaksOff
        left[0] -= 1
        return real(self, *arguments)

    redis = FaktoryRedis(redis_server.url)
    with monkeypatch.context() as patched:
        patched.setattr(FaktoryRedis, method, fails)
        with pytest.raises(BreaksOff):
            import_jobs.Import(redis, get_broker(), "default", chunk_size=3).run(lambda _: None)
    redis.close()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("method", ["window", "drop"])
@pytest.mark.parametrize("times", range(6))
def test_an_interrupted_import_neither_loses_nor_duplicates_jobs(method, times, server, redis, take, monkeypatch):
    load(redis, recorded("1.10.0"))
    broken_off(server, monkeypatch, method=method, times=times)
    in_redis = jids(redis, "q:default", "q:mail", "q:halted", "q:work", "scheduled", "retries", "dead")
    assert {*in_redis, *states()} >= STATES.keys() - {"jid-working"}
    take()
    assert states() == STATES


@pytest.mark.django_db(transaction=True)
def test_jobs_finished_before_their_removal_from_redis_are_not_imported_again(server, redis, take, monkeypatch):
    load(redis, {"q:mail": ["list", [raw("b", "mail"), raw("a", "mail")]]})
    broken_off(server, monkeypatch, method="drop")
    assert fetched("mail") == ["jid-a---", "jid-b---"]
    get_broker().ack([Ack(jid=jid, wid="w1") for jid in ("jid-a---", "jid-b---")])
    [place] = take()["places"]
    assert (place["moved"], place["moved_before"], place["left"]) == (0, 2, 0)
    assert Job.objects.count() == 0
    assert jids(redis, "q:mail") == []


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ("no JSON", "invalid JSON"),
        (raw("a", args=None), "args: expected an array"),
        (raw("a", queue="other"), "waits in the queue mail, and says other"),
        (raw("a", "mail", failure="broken"), "failure: expected an object"),
        (raw("a", "mail", created_at="yesterday"), "created_at"),
        (raw("a", "mail", custom={"bid": "b-unknown"}), "b-unknown"),
        (b'{"jid":"jid-\xff"}', "expected UTF-8"),
    ],
)
def test_invalid_jobs_are_reported_and_left_in_redis(job, reason, redis, take):
    load(redis, {"q:mail": ["list", [job, raw("good", "mail")]]})
    report = take(code=4)
    [problem] = report["problems"]
    assert reason in problem["reason"]
    assert (problem["count"], report["moved"], report["left"]) == (1, 1, 1)
    assert redis.lrange("q:mail", 0, -1) == [job if isinstance(job, bytes) else job.encode()]
    redis.close()


def test_a_job_with_an_existing_jid_is_not_imported(redis, take):
    load(redis, {"q:mail": ["list", [raw("a", "mail")]]})
    take()
    load(redis, {"q:mail": ["list", [raw("a", "mail", retry=3)]]})
    [problem] = take(code=4)["problems"]
    assert problem == {"reason": "is stored here already", "count": 1, "jids": ["jid-a---"]}
    assert Job.objects.get().retry == 25


def test_only_the_first_of_two_jobs_with_one_jid_is_imported(redis, take):
    load(redis, {"q:mail": ["list", [raw("a", "mail", retry=3), raw("a", "mail")]]})
    [problem] = take(code=4)["problems"]
    assert problem["reason"].startswith("is in this Redis twice")
    assert Job.objects.get().retry == 25


def test_only_one_of_two_equal_unique_jobs_is_imported(redis, take):
    unique = {"unique_for": 600}
    load(redis, {"q:mail": ["list", [raw("b", "mail", custom=unique), raw("a", "mail", custom=unique)]]})
    report = take(code=4)
    assert [problem["reason"] for problem in report["problems"]] == ["Job not unique"]
    assert states() == {"jid-a---": "enqueued"}


def test_keys_that_are_not_jobs_are_noted(redis, take):
    load(redis, {"processed": ["string", "7"], "failures:2026-01-01": ["string", "1"], "b-1:x": ["string", "?"],
                 "q:mail": ["list", [raw("a", "mail")]]})  # fmt: skip
    numbers, others = take()["notes"]
    assert "2 keys" in numbers
    assert "b-1:x (string)" in others


def test_import_refuses_a_running_faktory_server(redis, faktory, server):
    load(redis, {"q:mail": ["list", [raw("a", "mail")]]})
    redis.ping()
    answer = faktory("import-faktory", server.url, "--yes")
    assert (answer.code, "stop Faktory" in answer.err) == (1, True)
    assert faktory("import-faktory", server.url, "--yes", "--while-connected").code == 0


def test_a_job_fetched_by_another_client_during_the_import_is_reported(redis, take, monkeypatch):
    load(redis, {"q:mail": ["list", [raw("b", "mail"), raw("a", "mail")]]})
    real = FaktoryRedis.drop

    def drop(self, place, entries):
        redis.rpop("q:mail")
        return real(self, place, entries)

    monkeypatch.setattr(FaktoryRedis, "drop", drop)
    [problem] = take(code=4)["problems"]
    assert problem == {"reason": import_jobs.ELSEWHERE, "count": 1, "jids": []}


def test_import_requires_the_yes_option(redis, faktory, server):
    load(redis, {"q:mail": ["list", [raw("a", "mail")]]})
    answer = faktory("import-faktory", server.url)
    assert (answer.code, "--yes" in answer.err, Job.objects.count()) == (1, True, 0)


@pytest.mark.parametrize(
    ("url", "code", "message"),
    [
        ("redis://127.0.0.1:1/0", 3, "Redis unavailable"),
        ("tcp://127.0.0.1:7419", 1, "redis://"),
        ("redis+cluster://127.0.0.1:1", 1, "one server"),
    ],
)
def test_an_invalid_or_unreachable_address_is_reported_in_one_line(url, code, message, faktory):
    answer = faktory("import-faktory", url, "--yes")
    assert (answer.code, message in answer.err, answer.err.strip().count("\n")) == (code, True, 0)


def test_import_refuses_a_redis_that_does_not_list_its_clients(redis, faktory, server):
    redis.acl_setuser("ann", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all", "-client|list"])
    redis.close()
    answer = faktory("import-faktory", server.url.replace("//", "//ann:secret@"), "--yes")
    assert (answer.code, "--while-connected" in answer.err, "secret" in answer.err) == (1, True, False)


def test_an_import_continues_after_redis_was_unavailable(redis, take, monkeypatch, faktory, server):
    load(redis, {"q:mail": ["list", [raw("a", "mail")]]})

    def unavailable(self, *arguments):
        raise BrokerUnavailable("Redis unavailable: gone")

    with monkeypatch.context() as patched:
        patched.setattr(FaktoryRedis, "drop", unavailable)
        assert faktory("import-faktory", server.url, "--yes").code == 3
    assert Job.objects.filter(jid="jid-a---").count() == 1
    assert take()["moved"] == 1
    assert states() == {"jid-a---": "enqueued"}
