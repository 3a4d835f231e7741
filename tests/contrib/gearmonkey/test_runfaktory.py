"""Test `manage.py runfaktory --gearmonkey`: real processes serve a project's tasks to GearMonkey clients."""

import json
import signal
import time

import pytest

from django_faktory.contrib.gearmonkey import OPT_BLOCKING, OPT_ROLLCALL, NoWorkers, Status
from django_faktory.models import Job
from tests.contrib.gearmonkey.naive import NaiveWorker
from tests.contrib.gearmonkey.tasks import elsewhere, elsewhere_sum, unserved
from tests.runtime.processes.conftest import meeting, runfaktory  # noqa: F401  (fixtures)
from tests.tracers import UNTRACED
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once]

SERVED = ("shout", "add", "fails", "flaky", "slowly")
WORKER = ("--worker-only", "--processes", "1", "--concurrency", "2")


@pytest.fixture
def serve(runfaktory, server, redis):  # noqa: F811
    """Start workers for the clients and wait until each function has one."""

    def start(*args, environment=None, **settings):
        program = runfaktory(
            *(*WORKER, "--gearmonkey", server.url, *args),
            environment={"FAKTORY_TEST_APPS": "tests.contrib.gearmonkey", **(environment or {})},
            **({"GEARMONKEY_LEASE": 2} | settings),
        )
        counts = [f"count:{fn}" for fn in SERVED]  # each function increments its own count
        wait_until(lambda: all(redis.mget(counts)), 60, what=program.lines)
        return program

    return start


def ran(client, fn, input, **more):
    return client.get(fn, client.run(fn, input, options=[OPT_BLOCKING, OPT_ROLLCALL], timeout=30, **more))


def test_workers_keep_retrying_an_unreachable_cluster_without_a_traceback(runfaktory, transactional_db):  # noqa: F811
    program = runfaktory(
        *(*WORKER, "--gearmonkey", "redis+cluster://127.0.0.1:9"),
        environment={"FAKTORY_TEST_APPS": "tests.contrib.gearmonkey"},
    )
    log_lines = program.wait_for_log("Redis unavailable", "trying again", times=2)
    assert not [line for line in log_lines if "Traceback" in line]
    program.signal(signal.SIGTERM)
    assert program.code() == 0


class TestDirect:
    @pytest.mark.quick
    def test_a_task_serves_a_function(self, serve, client):
        serve()
        assert ran(client, "shout", "hello").output == b"HELLO"
        assert ran(client, "add", [2, 3]).json() == 5
        assert ran(client, "add", {"first": 2, "second": 5}).json() == 7
        assert not Job.objects.exists()

    def test_an_exception_of_a_task_is_the_outcome_without_a_retry(self, serve, client):
        serve()
        job = ran(client, "fails", "x")
        assert (job.status, job.output) == (Status.ERROR, b"ValueError: x")
        job = ran(client, "flaky", "")
        assert (job.status, job.output) == (Status.ERROR, b"ValueError: attempt 1")

    def test_invalid_input_fails_only_its_own_job(self, serve, client):
        serve(GEARMONKEY_MAX_INPUT_BYTES=100)
        assert ran(client, "shout", b"\xff").text.startswith("InvalidInput: input: expected UTF-8")
        assert ran(client, "shout", "x" * 101).text == "InvalidInput: input: expected at most 100 bytes, got 101"
        assert ran(client, "add", "").text.startswith("TypeError: ")
        assert ran(client, "shout", "fine").text == "FINE"

    def test_progress_is_reported_while_a_task_runs(self, serve, client, meeting):  # noqa: F811
        serve()
        id = client.run("slowly", str(meeting))
        wait_until(lambda: client.get("slowly", id).divisor is not None)
        job = client.get("slowly", id)
        assert (job.status, job.dividend, job.divisor) == (Status.BUSY, 3, 10)
        meeting.release_task()
        wait_until(lambda: client.get("slowly", id).text == "done")

    def test_a_job_of_a_killed_worker_is_rerun_before_its_lease_ends(self, serve, client, meeting, naive):  # noqa: F811
        """GearMonkey H03: the supervisor reports the death, so the job does not wait for the lease to end."""
        serve(GEARMONKEY_LEASE=60)
        id = client.run("slowly", str(meeting))
        first = meeting.pid()
        import os

        os.kill(first, signal.SIGKILL)
        begun = time.monotonic()
        meeting.pid(but=first)
        assert time.monotonic() - begun < 15
        meeting.release_task()
        wait_until(lambda: client.get("slowly", id).status is Status.SUCCESS)
        assert set(naive.get("slowly", id)) == {
            *(b"status", b"input", b"output", b"status:dividend", b"status:divisor"),
        }

    def test_a_stopping_worker_is_uncounted_and_releases_its_job(
        self,
        serve,
        client,
        redis,
        meeting,  # noqa: F811
    ):
        program = serve(SHUTDOWN_TIMEOUT=0.3, environment=UNTRACED)
        id = client.run("slowly", str(meeting))
        meeting.pid()
        program.signal(signal.SIGTERM)
        assert program.code() == 0
        assert redis.get("count:shout") == b"0"
        assert client.get("slowly", id).status is Status.IDLE
        assert redis.lrange("queue:slowly:normal", 0, -1) == [str(id).encode()]
        with pytest.raises(NoWorkers):
            client.run("shout", "x", options=[OPT_ROLLCALL])


class TestElsewhere:
    def test_a_task_is_executed_by_a_naive_worker(self, serve, server):
        serve(GEARMONKEY_URL=server.url)
        with NaiveWorker(server.client(), "elsewhere", lambda input: f"<{input.decode()}>"):
            result = elsewhere.enqueue("hello")
            wait_until(lambda: Job.objects.get(jid=result.id).state == "succeeded")
        assert json.loads(Job.objects.get(jid=result.id).result) == "<hello>"

    def test_a_remote_error_fails_the_task_and_remote_output_is_converted(self, serve, server):
        serve(GEARMONKEY_URL=server.url)

        def add(input):
            return str(sum(json.loads(input)))

        with NaiveWorker(server.client(), "elsewhere.sum", add):
            good, bad = elsewhere_sum.enqueue(1, 2), elsewhere_sum.enqueue(1, "x")
            wait_until(lambda: Job.objects.get(jid=good.id).state == "succeeded")
            wait_until(lambda: Job.objects.get(jid=bad.id).state == "dead")
        assert Job.objects.get(jid=good.id).result == "3"
        assert "RemoteFailure" in Job.objects.get(jid=bad.id).errtype

    def test_a_task_with_a_roll_call_fails_if_no_worker_serves_it(self, serve, server):
        serve(GEARMONKEY_URL=server.url)
        result = unserved.enqueue()
        wait_until(lambda: Job.objects.get(jid=result.id).state == "dead")
        assert "NoWorkers" in Job.objects.get(jid=result.id).errtype


class TestStarting:
    @pytest.mark.parametrize(
        ("args", "code", "words"),
        [
            (["--gearmonkey", "http://localhost"], 1, "got the scheme 'http'"),
            (["--gearmonkey"], 1, "no server is known"),
            (["--gearmonkey", "redis://localhost", "--drain"], 1, "expected --drain or --gearmonkey, got both"),
        ],
    )
    def test_invalid_arguments_are_reported_with_an_error(self, runfaktory, args, code, words):  # noqa: F811
        program = runfaktory(*WORKER, *args, environment={"FAKTORY_TEST_APPS": "tests.contrib.gearmonkey"})
        assert program.code() == code
        assert words in program.text

    def test_the_command_fails_if_no_task_serves_a_function(self, runfaktory, server):  # noqa: F811
        program = runfaktory(*WORKER, "--gearmonkey", server.url)
        assert program.code() == 1
        assert "no task serves a function" in program.text


@pytest.mark.parametrize("mode", ["direct", "gateway"])
def test_workers_start_as_soon_as_redis_has_memory_again(runfaktory, server, redis, client, mode):  # noqa: F811
    redis.config_set("maxmemory", 1)
    try:
        program = runfaktory(
            *(*WORKER, "--gearmonkey", server.url),
            environment={"FAKTORY_TEST_APPS": "tests.contrib.gearmonkey"},
            GEARMONKEY_LEASE=2,
            GEARMONKEY_MODE=mode,
        )
        program.wait_for_log("maxmemory", timeout_s=60)
        assert redis.get("count:shout") is None
    finally:
        redis.config_set("maxmemory", 0)
    wait_until(lambda: int(redis.get("count:shout") or 0) > 0, 60, what=program.lines)
    assert ran(client, "shout", "hello").output == b"HELLO"
