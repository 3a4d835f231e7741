"""Test workers with naive peers, and through kills, silence, flushes and restarts (GearMonkey H01 to H16)."""

import os
import random
import signal
import threading
import time
from contextlib import suppress

import psutil
import pytest
from redis import RedisError

from django_faktory.contrib.gearmonkey import (
    OPT_BLOCKING,
    OPT_ROLLCALL,
    AsyncClient,
    Client,
    JobCreationFailed,
    JobTimeout,
    NoWorkers,
    Status,
    Worker,
)
from django_faktory.contrib.gearmonkey.redis_worker import RedisWorker
from django_faktory.errors import BrokerUnavailable, FaktoryError
from tests.contrib.gearmonkey.naive import NaiveWorker
from tests.programs import Program
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once]

FIELDS = {b"status", b"input", b"output"}


def shout(input):
    return input.decode().upper()


@pytest.fixture
def spawn(server, tmp_path):
    """Return a function that starts a worker of this package in a process."""
    programs = []

    def start(lease=1.0, *, waits=True):
        program = Program(
            *("-m", "tests.contrib.gearmonkey.program", server.url, str(lease), str(tmp_path)),
            DJANGO_SETTINGS_MODULE="tests.settings",
        )
        programs.append(program)
        if waits:
            program.wait_for_log("working")
        return program

    yield start
    for program in programs:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            os.kill(program.pid, signal.SIGCONT)
        program.clean_up()


@pytest.fixture
def every(server):
    """Call a function repeatedly in a thread until the test ends."""
    stopping, threads = threading.Event(), []

    def start(interval_s, act):
        client = server.client()

        def repeat():
            while not stopping.wait(interval_s):
                with suppress(RedisError):
                    act(client)

        threads.append(threading.Thread(target=repeat, daemon=True))
        threads[-1].start()

    yield start
    stopping.set()
    for thread in threads:
        thread.join(60)


def statuses(redis, fn, ids):
    pipeline = redis.pipeline(transaction=False)  # without a transaction: Redis refuses EXEC when it is out of memory
    for id in ids:
        pipeline.hget(f"job:{fn}:{id}", "status")
    return pipeline.execute()


def all_succeed(redis, fn, ids, timeout_s=60):
    wait_until(lambda: statuses(redis, fn, ids).count(b"success") == len(ids), timeout_s, every_s=0.1)


def unfinished(redis):
    return redis.keys("gm:lease:*") + redis.keys("gm:meta:*")


class TestWithNaivePeers:
    @pytest.mark.quick
    def test_h01_a_naive_worker_executes_a_job_of_our_client(self, client, server):
        with NaiveWorker(server.client(), "f", shout):
            id = client.run("f", "hello", options=[OPT_BLOCKING], timeout=10)
        job = client.get("f", id)
        assert (job.status, job.output) == (Status.SUCCESS, b"HELLO")

    @pytest.mark.quick
    @pytest.mark.parametrize("prio", ["high", "normal", "low", "scheduled"])
    def test_h02_our_worker_executes_a_job_of_a_naive_client(self, naive, work, prio):
        work(f=shout)
        id = naive.run("f", "hello", prio, blocking=True, timeout=5, scheduled=int(time.time()))
        assert naive.answer == (f"lock:f:{id}".encode(), b"OK")
        assert naive.get("f", id) == {b"status": b"success", b"input": b"hello", b"output": b"HELLO"}

    def test_h13_our_jobs_leave_the_same_events_and_keys_as_naive_ones(self, client, naive, work, server):
        work(f=shout)
        with NaiveWorker(server.client(), "g", shout):
            ours, theirs = traces(server, "f", client.run), traces(server, "g", naive.run)
        assert ours == theirs
        assert ours[0] == ["create:1", "start:1", "finish:1"]
        specified = {b"uid", b"count", b"job", b"queue", b"lock"}
        assert {key.split(b":")[0] for key in server.client().keys("*")} - specified == {b"gm"}


def traces(server, fn, run):
    """Run one job; return the events, and each remaining key with its value and its TTL rounded to 10 s."""
    redis, received = server.client(), []
    pubsub = redis.pubsub(ignore_subscribe_messages=True)
    pubsub.subscribe(f"channel:{fn}")
    pubsub.get_message(timeout=1)
    run(fn, "x")

    def listen():
        message = pubsub.get_message(timeout=0.1)
        received.extend([message["data"].decode()] if message else [])
        return "finish:1" in received and redis.ttl(f"lock:{fn}:1") > 0

    wait_until(listen)
    left = {}
    for key in (key.decode() for key in redis.keys(f"*:{fn}") + redis.keys(f"*:{fn}:*")):
        if not key.startswith("gm:"):
            value = redis.hgetall(key) if redis.type(key) == b"hash" else redis.dump(key)
            left[key.replace(f":{fn}", ":*")] = value, round(redis.ttl(key), -1)
    pubsub.close()
    return received, left


class TestDeaths:
    def test_h03_a_job_of_a_killed_worker_is_rerun_after_its_lease(self, spawn, client, redis, tmp_path, naive):
        first = spawn()
        id = client.run("f", "hold")
        wait_until((tmp_path / "pid").exists)
        first.signal(signal.SIGKILL)
        (tmp_path / "go").touch()
        spawn()
        begun = time.monotonic()
        wait_until(lambda: client.get("f", id).status is Status.SUCCESS)
        assert time.monotonic() - begun < 15, "after its lease of 1 s, not after the usual one of 20 s"
        assert (tmp_path / "runs").read_text().split() == [str(id)] * 2
        assert set(naive.get("f", id)) == FIELDS
        assert unfinished(redis) == []

    def test_h04_a_suspended_worker_changes_nothing_when_it_resumes(self, spawn, client, redis, tmp_path, events):
        first = spawn()
        id = client.run("f", "hold")
        wait_until((tmp_path / "pid").exists)
        assert int((tmp_path / "pid").read_text()) == first.pid
        first.signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        second = spawn()
        wait_until(lambda: client.get("f", id).status is Status.SUCCESS)
        before = client.get("f", id).output
        assert before == f"HOLD by {second.pid}".encode()
        first.signal(signal.SIGCONT)
        first.wait_for_log("no longer this worker's")
        assert client.get("f", id).output == before
        assert events(4) == ["create:1", "start:1", "start:1", "finish:1"]

    def test_an_end_that_is_sent_again_after_its_reply_was_lost_is_not_late(self, redis, client):
        """A frozen Redis executes the first call when it continues, and the worker then logged a lost lease."""
        client.run("f", "x")
        redis_worker = RedisWorker(redis, ["f"], wid="w1")
        [job] = redis_worker.take(1)
        assert redis_worker.finish(job, Status.SUCCESS, b"done")
        assert redis_worker.finish(job, Status.SUCCESS, b"done")
        assert not redis_worker.finish(job, Status.SUCCESS, b"another output")
        assert client.get("f", 1).output == b"done"

    @pytest.mark.quick
    def test_h05_a_job_fails_after_five_of_its_workers_have_died(self, redis, client, events):
        id = client.run("f", "x")
        for death in range(5):
            redis_worker = RedisWorker(redis, ["f"], wid=f"w{death}", lease_s=0.01)
            wait_until(lambda redis_worker=redis_worker: redis_worker.take(1))
            wait_until(lambda redis_worker=redis_worker: any(redis_worker.sweep()))
        job = client.get("f", id)
        assert (job.status, job.output) == (Status.ERROR, b"worker died")
        assert redis.lrange(f"lock:f:{id}", 0, -1) == [b"OK"]
        assert events(7)[-1] == f"finish:{id}"
        assert redis.llen("queue:f:normal") == 0
        assert unfinished(redis) == []

    def test_h07_the_worker_count_is_corrected_after_all_our_workers_are_killed(self, spawn, redis, server):
        NaiveWorker(redis, "f", shout).start()
        programs = [spawn() for _ in range(3)]
        wait_until(lambda: redis.get("count:f") == b"4")
        for program in programs:
            program.signal(signal.SIGKILL)
        survivor = RedisWorker(server.client(), ["f"], wid="survivor")
        wait_until(lambda: survivor.sweep() and redis.get("count:f") == b"1", 15)

    @pytest.mark.quick
    def test_h12_dead_workers_do_not_answer_a_roll_call(self, redis, client):
        RedisWorker(redis, ["f"], wid="dead", lease_s=0.05).register()
        assert redis.get("count:f") == b"1"

        def refused():
            try:
                client.run("f", "x", options=[OPT_ROLLCALL])
            except NoWorkers:
                return True

        wait_until(refused, 15)
        assert redis.get("count:f") == b"0"

    def test_random_worker_kills_lose_none_of_600_jobs_and_the_count_recovers(self, spawn, client, redis, tmp_path):
        programs = [spawn(waits=False) for _ in range(10)]
        wait_until(lambda: redis.get("count:f") == b"10", 60)
        ids = [client.run("f", f"nap {random.uniform(0, 0.1):.3f}") for _ in range(600)]
        for kills in range(7):
            wait_until(lambda kills=kills: statuses(redis, "f", ids).count(b"success") >= 60 * (kills + 1), 60)
            programs.pop(random.randrange(len(programs))).signal(signal.SIGKILL)
        wait_until(lambda: redis.get("count:f") == b"3", 30)
        all_succeed(redis, "f", ids)
        wait_until(lambda: unfinished(redis) == [])
        runs = (tmp_path / "runs").read_text().split()
        assert len(set(runs)) == 600
        assert 600 <= len(runs) <= 607


class TestFlushesAndCuts:
    def test_h06_the_next_heartbeats_restore_the_worker_count_after_a_flush(self, work, redis):
        for _ in range(3):
            work(f=shout)
        wait_until(lambda: redis.get("count:f") == b"3")
        redis.flushall()
        wait_until(lambda: redis.get("count:f") == b"3", 15)

    def test_h08_flushed_scripts_lose_no_job(self, work, client, redis, every):
        work(f=shout)
        work(f=shout)
        every(0.1, lambda found: found.script_flush())
        ids = [client.run("f", "x") for _ in range(500)]
        all_succeed(redis, "f", ids)

    def test_h09_cut_connections_lose_no_job(self, work, server, redis, every):
        ids = []
        with Client(server.url) as client:
            ids = [client.run("f", "x") for _ in range(500)]
        for _ in range(3):
            work(f=shout)

        def cut(found):
            victims = [one for one in found.client_list() if int(one["id"]) != found.client_id()]
            found.client_kill_filter(_id=random.choice(victims)["id"])

        every(0.1, cut)
        wait_until(lambda: _quietly(statuses, redis, "f", ids).count(b"success") == 500, 60, every_s=0.1)

    def test_workers_and_blocking_clients_reconnect_to_a_restarted_server(self, own):
        server = own("--appendonly", "yes", "--appendfsync", "always")
        worker = Worker(server.url, lease_s=1.0, sweep_every_s=0.1)
        worker.accept("f", shout)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        with Client(server.url) as client:
            client.run("f", "before", options=[OPT_BLOCKING], timeout=10)
            waiting = threading.Thread(target=client.run, args=("g", "x", "normal", [OPT_BLOCKING]), daemon=True)
            waiting.start()
            wait_until(lambda: server.client().exists("job:g:1"))
            server.stop(signal.SIGKILL)
            with pytest.raises(JobCreationFailed, match="unavailable"):
                client.run("f", "x")
            with pytest.raises(BrokerUnavailable):
                client.get("f", 1)
            server.start()
            id = wait_until(lambda: _quietly(client.run, "f", "after", options=[OPT_BLOCKING], timeout=10))
            assert client.get("f", id).output == b"AFTER"
            assert waiting.is_alive()
            with NaiveWorker(server.client(), "g", shout):
                wait_until(lambda: client.get("g", 1).status is Status.SUCCESS)
                waiting.join(2)
            assert not waiting.is_alive()
        worker.stop()
        thread.join(60)

    def test_h15_a_crash_of_the_server_leaves_no_partly_created_job(self, own):
        server = own("--appendonly", "yes", "--appendfsync", "everysec")
        made, stopping = [], threading.Event()

        def make():
            with Client(server.url) as client, suppress(JobCreationFailed):
                while not stopping.is_set():
                    made.append((client.run("f", "x"), time.monotonic()))

        thread = threading.Thread(target=make)
        thread.start()
        wait_until(lambda: len(made) > 500)
        wait_until(lambda: time.monotonic() - made[0][1] > 2.5, every_s=0.1)
        crashed_at = time.monotonic()
        server.stop(signal.SIGKILL)
        thread.join()
        server.start()
        redis = server.client()
        kept = {int(id) for id in redis.lrange("queue:f:normal", 0, -1)}
        assert {int(key.rpartition(b":")[2]) for key in redis.keys("job:f:*")} == kept
        assert max(kept) == int(redis.get("uid:f"))
        assert all(id in kept for id, at in made if at < crashed_at - 1.5)


class TestWaiting:
    def test_h10_a_lost_message_delays_a_blocking_run_by_two_seconds_at_most(self, redis, client, server):
        returned = []

        def run():
            client.run("f", "x", options=[OPT_BLOCKING], timeout=0)
            returned.append(time.monotonic())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        wait_until(lambda: redis.info("clients")["blocked_clients"] == 1)
        redis.hset("job:f:1", mapping={"status": "success", "output": "y"})
        ended_at = time.monotonic()
        thread.join(60)
        assert returned[0] - ended_at < 2 + 8, "a busy machine adds some seconds"

    def test_h11_a_blocking_run_times_out_and_its_job_continues(self, client, work):
        release = threading.Event()
        work(f=lambda _: release.wait(60) and "late")
        begun = time.monotonic()
        with pytest.raises(JobTimeout, match="it continues") as caught:
            client.run("f", "x", options=[OPT_BLOCKING], timeout=1)
        assert time.monotonic() - begun >= 1.0
        release.set()
        wait_until(lambda: client.get("f", caught.value.id).text == "late")

    def test_a_stale_finish_message_does_not_end_a_blocking_run(self, redis, client):
        begun = time.monotonic()
        waiting = threading.Thread(
            target=lambda: _quietly(client.run, "f", "x", options=[OPT_BLOCKING], timeout=2), daemon=True
        )
        waiting.start()
        wait_until(lambda: redis.exists("job:f:1"))
        redis.lpush("lock:f:1", "OK")
        before = redis.info("stats")["total_commands_processed"]
        waiting.join(60)
        assert time.monotonic() - begun >= 2
        assert redis.info("stats")["total_commands_processed"] - before < 200

    def test_async_clients_wait_for_many_jobs_concurrently(self, server, work):
        import asyncio

        work(f=shout)

        async def main():
            async with AsyncClient(server.url) as client:
                runs = [
                    client.run("f", f"job {n}", options=[OPT_BLOCKING, OPT_ROLLCALL], timeout=10) for n in range(20)
                ]
                ids = await asyncio.gather(*runs)
                jobs = [await client.get("f", id) for id in ids]
                with pytest.raises(NoWorkers):
                    await client.run("unserved", "x", options=[OPT_ROLLCALL])
                with pytest.raises(JobTimeout):
                    await client.run("unserved", "x", options=[OPT_BLOCKING], timeout=0.1)
            return sorted(job.text for job in jobs)

        assert asyncio.run(main()) == sorted(f"JOB {n}" for n in range(20))


class TestTheServer:
    @pytest.mark.quick
    def test_h14_a_job_lost_by_another_worker_is_queued_again_once(self, naive, redis, station_of, client):
        lost, kept = naive.run("f", "lost"), client.run("f", "kept", "low")
        redis.brpop("queue:f:normal", 1)
        redis_worker = station_of("f")
        assert redis_worker.audit(after_s=0.2) == []
        assert redis.llen("queue:f:normal") == 0
        wait_until(lambda: redis_worker.audit(after_s=0.2) == [f"f:{lost}"])
        assert redis_worker.audit(after_s=0) == []
        assert redis.lrange("queue:f:normal", 0, -1) == [str(lost).encode()]
        assert [job.id for job in redis_worker.take(5)] == [str(lost), str(kept)]
        assert redis_worker.audit(after_s=0) == []

    def test_without_redis_memory_new_jobs_are_rejected_and_running_ones_finish(self, redis, client, work):
        may_finish = threading.Event()
        work(f=lambda input: may_finish.wait(60) and shout(input))
        ids = [client.run("f", "x") for _ in range(20)]
        wait_until(lambda: b"busy" in statuses(redis, "f", ids))
        redis.config_set("maxmemory", 1)
        try:
            with pytest.raises(JobCreationFailed, match="maxmemory"):
                client.run("f", "x")
            may_finish.set()
            all_succeed(redis, "f", ids, 20)
        finally:
            redis.config_set("maxmemory", 0)
        assert redis.get("uid:f") == b"20"


@pytest.fixture
def station_of(redis):
    return lambda *fns: RedisWorker(redis, fns, wid="w1")


def _quietly(function, *args, **kwargs):
    """Return the function's result, or an empty list if the connection was cut."""
    try:
        return function(*args, **kwargs)
    except (FaktoryError, RedisError):
        return []
