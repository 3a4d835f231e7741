"""Test `manage.py faktory export-faktory`: jobs are written as the original would write them, each exactly once."""

import json

import pytest

from django_faktory.contrib.transfer import export_jobs
from django_faktory.contrib.transfer.redis_layout import EXPORTED, FaktoryRedis
from django_faktory.models import Job
from django_faktory.store import queues
from django_faktory.store.jobs import pushes
from django_faktory.store.store import Store
from tests.contrib.transfer.conftest import RECORDED, jids, load, recorded
from tests.contrib.transfer.test_import import BreaksOff
from tests.factories import JobFactory, WorkerFactory, payload
from tests.management.cli.test_documented import documented, shape

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]

EVERY = pytest.mark.parametrize("release", sorted(RECORDED))


@pytest.fixture
def give(asked, server):
    """Return a function that exports all jobs and returns the JSON answer."""

    def run(*options, code=0):
        return asked("export-faktory", server.url, "--yes", *options, code=code)

    return run


def without_times(job):
    """Leave out the times that a move replaces; rows store microseconds."""
    failure = {key: value for key, value in job.get("failure", {}).items() if key != "next_at"}
    return {key: value for key, value in job.items() if key != "enqueued_at"} | {"failure": failure}


def parsed(contents, key):
    kind, found = contents[key]
    return (
        [(json.loads(raw), None) for raw in found] if kind == "list" else [(json.loads(raw), at) for raw, at in found]
    )


def contents(redis, *keys):
    found = {}
    for key in keys:
        if redis.type(key) == b"list":
            found[key] = ["list", [raw.decode() for raw in redis.lrange(key, 0, -1)]]
        else:
            found[key] = ["zset", [[raw.decode(), at] for raw, at in redis.zrange(key, 0, -1, withscores=True)]]
    redis.close()
    return found


@EVERY
def test_jobs_imported_from_real_faktory_data_are_exported_unchanged(release, redis, asked, server, give):
    there = recorded(release)
    load(redis, there)
    asked("import-faktory", server.url, "--yes")
    give("--layout", release.rpartition(".")[0])
    prefix = "q:" if release.startswith("1.10") else ""
    keys = [f"{prefix}mail", f"{prefix}default", f"{prefix}work", "retries", "dead"]
    back = contents(redis, *keys)
    for key in keys:
        for (came, score), (was, had) in zip(parsed(back, key), parsed(there, key), strict=True):
            assert without_times(came) == without_times(was)
            assert score == pytest.approx(had, abs=2e-6)
    assert redis.smembers("queues") >= {b"mail", b"default", b"halted", b"work"}
    assert redis.smembers("paused") == {b"halted"}
    assert redis.exists(EXPORTED) == 0
    redis.close()
    assert Job.objects.count() == 0


@pytest.mark.parametrize(("layout", "key"), [(None, "q:mail"), ("1.9", "mail"), ("1.10", "q:mail")])
def test_an_empty_redis_receives_the_requested_layout(layout, key, redis, give):
    pushes.push(Store(), [payload(1, queue="mail")])
    assert give(*(["--layout", layout] if layout else []))["layout"] == (layout or "1.10")
    assert jids(redis, key) == ["job-1..."]


def test_exported_queues_keep_the_fetch_order_of_jobs(redis, give):
    for jid, priority in (("a", 0), ("b", 0), ("urgent", 50)):
        pushes.push(Store(), [payload(jid, priority=priority)])
    give()
    assert jids(redis, "q:default") == ["job-b...", "job-a...", "job-urgent"]


def test_a_rescheduled_job_is_exported_with_its_current_time(redis, give):
    job = JobFactory(scheduled=True)
    give()
    [[raw, score]] = contents(redis, "scheduled")["scheduled"][1]
    assert (json.loads(raw)["at"], score) == ("2026-05-01T13:00:00Z", job.run_at.timestamp())


def test_jobs_that_are_not_exported_are_reported_with_reason_and_count(give):
    JobFactory(working=True)
    JobFactory(bid="b-1", queue="mail")
    report = give(code=4)
    assert {problem["reason"].split()[0]: problem["count"] for problem in report["problems"]} == {"a": 1, "belongs": 1}
    assert Job.objects.count() == 2


def test_the_1_9_layout_refuses_a_queue_named_like_a_set(redis, give):
    JobFactory(queue="dead")
    [problem] = give("--layout", "1.9", code=4)["problems"]
    assert ("dead" in problem["reason"], problem["count"]) == (True, 1)
    give()
    assert len(jids(redis, "q:dead")) == 1


def test_a_dry_run_changes_nothing(redis, give):
    JobFactory(dead=True)
    queues.pause(Store(), ["mail"])
    assert give("--dry-run")["moved"] == 1
    assert (Job.objects.count(), redis.dbsize()) == (1, 0)
    redis.close()


def test_export_refuses_while_workers_are_connected(faktory, server):
    WorkerFactory(wid="w1")
    JobFactory()
    answer = faktory("export-faktory", server.url, "--yes")
    assert (answer.code, "1 worker connected here" in answer.err, Job.objects.count()) == (1, True, 1)


def test_the_answer_has_the_documented_shape(give):
    JobFactory()
    JobFactory(working=True)
    queues.pause(Store(), ["mail"])
    report = give(code=4)
    assert [problem.pop("jids") for problem in report["problems"]] == [[]]  # these jobs are only counted
    assert shape(report | {"problems": documented("export-faktory")["problems"]}) == shape(documented("export-faktory"))


def test_exporting_no_jobs_exits_with_code_2(give):
    assert give(code=2)["found"] == 0


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("times", range(3))
def test_an_interrupted_export_neither_loses_nor_duplicates_jobs(when, times, redis, server, give, monkeypatch):
    for n in range(7):
        pushes.push(Store(), [payload(f"n{n}")])
    made = set(Job.objects.values_list("jid", flat=True))
    left, real = [times], FaktoryRedis.add

    def fails(self, *arguments, **more):
        if when == "before" and not left[0]:
            raise BreaksOff
        real(self, *arguments, **more)
        left[0] -= 1
        if when == "after" and left[0] < 0:
            raise BreaksOff

    source = FaktoryRedis(server.url)
    with monkeypatch.context() as patched:
        patched.setattr(FaktoryRedis, "add", fails)
        with pytest.raises(BreaksOff):
            export_jobs.Export(source, "default", chunk_size=2).run(lambda _: None)
    source.close()
    give()
    assert sorted(jids(redis, "q:default")) == sorted(made)
    assert Job.objects.count() == 0
    assert redis.exists(EXPORTED) == 0
    redis.close()


@pytest.mark.django_db(transaction=True)
def test_a_job_started_here_after_its_export_is_reported(redis, give, server):
    job = JobFactory(working=True)
    load(redis, {EXPORTED: ["set", [job.jid]]})
    report = give(code=4)
    assert {"reason": export_jobs.MAY_RUN_TWICE, "count": 1, "jids": [job.jid]} in report["problems"]
