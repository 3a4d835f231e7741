"""Test the GearMonkey specification with raw commands on a real Redis, and with this package (W01 to W36).

The raw half shows how Redis answers a naive peer's commands; "ours" in a test name means this package's behaviour.
"""

import hashlib
import threading
import time
from datetime import UTC, datetime

import pytest
from redis import ResponseError
from redis.exceptions import NoScriptError

from django_faktory.contrib.gearmonkey import (
    OPT_BLOCKING,
    OPT_ROLLCALL,
    GearMonkeyError,
    JobCreationFailed,
    JobNotFound,
    NoWorkers,
    Status,
    Worker,
    lua,
)
from django_faktory.contrib.gearmonkey.redis_worker import RedisWorker
from tests.contrib.gearmonkey import naive as text
from tests.contrib.gearmonkey.naive import NaiveWorker
from tests.waiting import wait_until

pytestmark = pytest.mark.once

ONE_SPACE = text.DUE.replace("],  item", "], item")
QUEUES = [f"queue:f:{prio}" for prio in ("high", "normal", "low")]


@pytest.fixture
def redis_worker(redis):
    made = RedisWorker(redis, ["f"], wid="w1")
    made.open()
    return made


def due(redis, now):
    return redis.eval(text.DUE, 1, "queue:f:scheduled", now)


def ids(jobs):
    return [(job.fn, job.id) for job in jobs]


def shout(input):
    return input.decode().upper()


class TestMaking:
    """Cases W01, W20, W25, W27, W29, W30, and those close to W10."""

    @pytest.mark.parametrize("by", ["naive", "client"])
    def test_w01_a_new_job_creates_a_hash_a_queue_entry_and_an_event(self, request, redis, events, by):
        assert request.getfixturevalue(by).run("f", "hello") == 1
        assert redis.hgetall("job:f:1") == {b"status": b"idle", b"input": b"hello"}
        assert redis.lrange("queue:f:normal", 0, -1) == [b"1"]
        assert redis.ttl("job:f:1") == -1
        assert events(1) == ["create:1"]

    @pytest.mark.parametrize("answer", [None, "0", "-1", "abc"])
    def test_w20_a_roll_call_without_workers_leaves_no_trace(self, client, redis, answer):
        if answer is not None:
            redis.set("count:f", answer)
        with pytest.raises(NoWorkers, match="roll call for 'f'"):
            client.run("f", "x", options=[OPT_ROLLCALL])
        assert redis.keys("*") == ([] if answer is None else [b"count:f"])

    def test_w20_a_naive_worker_answers_the_roll_call(self, client, redis):
        NaiveWorker(redis, "f", shout).start()
        assert client.run("f", "x", options=[OPT_ROLLCALL]) == 1

    def test_w20_a_registry_of_a_wrong_type_fails_the_roll_call(self, client, redis):
        redis.set(lua.registry_key("f"), "x")
        with pytest.raises(NoWorkers, match="WRONGTYPE"):
            client.run("f", "x", options=[OPT_ROLLCALL])
        assert not redis.exists("uid:f")

    def test_w25_getting_an_unknown_job_raises_job_not_found(self, client, naive):
        assert naive.get("f", 9) == {}
        with pytest.raises(JobNotFound, match="f:9"):
            client.get("f", 9)

    def test_w26_the_misprinted_command_hgetalll_does_not_exist(self, redis):
        with pytest.raises(ResponseError, match="unknown command"):
            redis.execute_command("HGETALLL", "job:f:1")

    def test_w27_a_lost_id_counter_does_not_overwrite_our_old_jobs(self, redis, naive, client):
        redis.hset("job:f:1", mapping={"status": "success", "output": "OLD"})
        redis.expire("job:f:1", 90000)
        naive.run("f", "new")
        assert naive.get("f", 1)[b"output"] == b"OLD"
        assert redis.ttl("job:f:1") > 0
        redis.delete("uid:f")
        assert client.run("f", "new") == 2
        assert client.get("f", 2).raw == {b"status": b"idle", b"input": b"new"}
        assert redis.ttl("job:f:2") == -1

    def test_w27_a_new_job_takes_the_first_free_id_behind_ten_thousand_old_jobs(self, redis, client):
        pipeline = redis.pipeline()
        for id in range(1, 10_001):
            pipeline.hset(f"job:f:{id}", "status", "success")
        pipeline.execute()
        assert client.run("f", "new") == 10_001

    @pytest.mark.parametrize("input", [b"", b"\x00\xff\r\n", "grün".encode()])
    def test_w29_input_and_output_are_bytes_and_may_be_empty(self, client, work, input):
        work(f=lambda found: found)
        made = client.run("f", input, options=[OPT_BLOCKING], timeout=10)
        job = client.get("f", made)
        assert (job.input, job.output) == (input, input)

    def test_w30_an_overflowing_id_counter_fails_the_creation_and_stores_nothing(self, client, redis):
        redis.set("uid:f", 2**63 - 1)
        with pytest.raises(JobCreationFailed, match="overflow"):
            client.run("f", "x")
        assert redis.keys("*") == [b"uid:f"]

    def test_w30_ids_beyond_the_integers_of_lua_are_exact(self, client, redis):
        redis.set("uid:f", 2**53 + 1)
        assert client.run("f", "x") == 2**53 + 2
        assert redis.exists(f"job:f:{2**53 + 2}")

    def test_w31_a_queue_key_of_a_wrong_type_fails_the_creation_completely(self, client, redis):
        redis.set("queue:f:normal", "x")
        with pytest.raises(JobCreationFailed, match="WRONGTYPE"):
            client.run("f", "x")
        assert redis.keys("*") == [b"queue:f:normal"]


class TestTaking:
    """Cases W02 to W11, W23, W24, W31, W33 to W35."""

    def test_w02_jobs_of_a_queue_are_taken_in_the_order_of_creation(self, naive, redis, redis_worker):
        made = [naive.run("f", "x") for _ in range(6)]
        popped = [redis.brpop(QUEUES, 1) for _ in range(3)]
        assert popped == [(b"queue:f:normal", str(id).encode()) for id in made[:3]]
        assert [job.id for job in redis_worker.take(2) + redis_worker.take(2)] == [str(id) for id in made[3:]]

    def test_w03_high_priority_is_taken_before_normal_and_normal_before_low(self, naive, redis, redis_worker):
        for _ in range(2):
            for prio in ("low", "normal", "high"):
                naive.run("f", prio, prio)
        taken = [job.input for _ in range(2) for job in redis_worker.take(1)]
        assert taken == [b"high", b"high"]
        assert [redis.brpop(QUEUES, 1)[0] for _ in range(4)] == [b"queue:f:normal"] * 2 + [b"queue:f:low"] * 2

    def test_w04_a_blocking_pop_of_empty_queues_times_out_with_no_job(self, redis, redis_worker):
        begun = time.monotonic()
        assert redis.brpop(QUEUES, 1) is None
        assert time.monotonic() - begun >= 1.0
        assert redis_worker.take(1) == []

    def test_w05_the_script_and_its_digest_match_the_specification(self, redis):
        assert lua.DUE == text.DUE
        assert len(lua.DUE) == 169
        assert redis.script_load(lua.DUE) == lua.DUE_SHA1 == hashlib.sha1(lua.DUE.encode()).hexdigest()
        assert redis.script_load(ONE_SPACE) == "14eede1cd25f7ebc1c5c3dc8db79813a62abacba"

    def test_w05_our_worker_reloads_the_specified_script_for_naive_peers(self, redis, redis_worker):
        redis.script_flush()
        with pytest.raises(NoScriptError):
            redis.evalsha(lua.DUE_SHA1, 1, "queue:f:scheduled", 0)
        redis_worker.open()
        assert redis.evalsha(lua.DUE_SHA1, 1, "queue:f:scheduled", 0) is None

    def test_w06_a_flushed_script_is_loaded_again_and_the_job_is_served(self, redis, client, work):
        work(f=shout)
        client.run("f", "one", options=[OPT_BLOCKING], timeout=10)
        redis.script_flush()
        made = client.run("f", "two", options=[OPT_BLOCKING], timeout=10)
        assert client.get("f", made).output == b"TWO"

    def test_w06_finishing_many_jobs_survives_a_flushed_script(self, redis, naive, redis_worker):
        made = [naive.run("f", "x") for _ in range(3)]
        jobs = redis_worker.take(3)
        redis.script_flush()
        assert redis_worker.finish_many([(job, Status.SUCCESS, b"y") for job in jobs]) == [True] * 3
        assert {redis.hget(f"job:f:{id}", "output") for id in made} == {b"y"}

    def test_w07_a_scheduled_job_is_taken_when_it_is_due(self, redis, naive, redis_worker):
        redis.zadd("queue:f:scheduled", {1: 100})
        assert due(redis, 99) is None
        assert due(redis, 100) == [b"queue:f:scheduled", b"1"]
        assert not redis.exists("queue:f:scheduled")
        naive.run("f", "past", "scheduled", scheduled=int(time.time()))
        naive.run("f", "future", "scheduled", scheduled=int(time.time()) + 100)
        assert [job.input for job in redis_worker.take(5)] == [b"past"]

    def test_w08_jobs_with_equal_times_are_taken_in_lexical_order_of_ids(self, redis, redis_worker):
        for id in (9, 10, 2):
            redis.hset(f"job:f:{id}", mapping={"status": "idle", "input": "x"})
            redis.zadd("queue:f:scheduled", {id: 5})
        assert [redis_worker.take(1)[0].id for _ in range(3)] == ["10", "2", "9"]

    def test_w09_a_negative_time_is_never_due_and_our_client_rejects_it(self, redis, redis_worker, client):
        redis.zadd("queue:f:scheduled", {1: -1})
        assert due(redis, 10**10) is None
        assert redis_worker.take(1) == []
        assert redis.zscore("queue:f:scheduled", 1) == -1
        with pytest.raises(ValueError, match="scheduled: expected seconds"):
            client.run("f", "x", "scheduled", scheduled=-1)
        assert not redis.exists("uid:f")

    def test_w10_an_invalid_time_is_rejected_and_our_worker_uses_server_time(self, redis, redis_worker, naive):
        with pytest.raises(ResponseError, match="not a float"):
            due(redis, "now")
        naive.run("f", "x", "scheduled", scheduled=0)
        assert len(redis_worker.take(1)) == 1

    def test_w11_a_due_scheduled_job_is_taken_before_high_priority(self, naive, redis_worker):
        naive.run("f", "high", "high")
        naive.run("f", "due", "scheduled", scheduled=1)
        assert [job.input for _ in range(2) for job in redis_worker.take(1)] == [b"due", b"high"]

    def test_w12_a_taken_job_is_busy_and_publishes_a_start_event(self, naive, redis_worker, redis, events):
        naive.run("f", "x")
        redis_worker.take(1)
        assert redis.hgetall("job:f:1") == {b"status": b"busy", b"input": b"x"}
        assert events(2) == ["create:1", "start:1"]

    def test_w23_a_dead_naive_worker_loses_its_job_and_ours_requeues_it(self, redis, naive, server, client):
        naive.run("f", "lost")
        other = server.client()
        other.brpop(QUEUES, 1)
        other.close()
        assert redis.llen("queue:f:normal") == 0
        assert naive.get("f", 1)[b"status"] == b"idle"
        kept = client.run("f", "kept")
        short = RedisWorker(redis, ["f"], wid="dead", lease_s=0.05)
        assert ids(short.take(1)) == [("f", str(kept))]
        wait_until(lambda: short.sweep().requeued == [f"f:{kept}"])
        assert redis.lrange("queue:f:normal", 0, -1) == [str(kept).encode()]
        assert client.get("f", kept).status == Status.IDLE

    def test_w24_a_job_without_data_fails_and_is_not_run(self, redis, client, work, events):
        ran = []
        redis.lpush("queue:f:normal", 7)
        work(f=ran.append)
        assert events(1) == ["finish:7"]
        job = client.get("f", 7)
        assert (job.status, job.output, ran) == (Status.ERROR, b"job data missing", [])
        assert 89_990 < redis.ttl("job:f:7") <= 90_000
        assert redis.lrange("lock:f:7", 0, -1) == [b"OK"]

    def test_w31_a_queue_key_of_wrong_type_does_not_block_other_queues(self, redis, naive, redis_worker):
        naive.run("f", "high", "high")
        naive.run("f", "low", "low")
        naive.run("f", "due", "scheduled", scheduled=1)
        redis.set("queue:f:normal", "x")
        assert [job.input for job in redis_worker.take(5)] == [b"due", b"high", b"low"]
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            redis.brpop(QUEUES, 1)

    def test_w31_schedule_and_job_keys_of_wrong_type_block_no_other_job(self, redis, naive, redis_worker):
        redis.set("queue:f:scheduled", "x")
        redis.set("job:f:9", "no hash")
        redis.lpush("queue:f:high", 9)
        naive.run("f", "fine")
        assert [job.input for job in redis_worker.take(5)] == [b"fine"]
        assert redis.lrange("lock:f:9", 0, -1) == [b"OK"]

    def test_w31_getting_a_job_key_of_a_wrong_type_raises_an_error(self, redis, client):
        redis.set("job:f:9", "no hash")
        with pytest.raises(GearMonkeyError, match="cannot be read"):
            client.get("f", 9)

    def test_w33_concurrent_workers_take_each_due_job_once(self, redis, server):
        pipeline = redis.pipeline()
        for id in range(500):
            pipeline.hset(f"job:f:{id}", mapping={"status": "idle", "input": "x"})
            pipeline.zadd("queue:f:scheduled", {id: 5})
        pipeline.execute()
        found = []

        def poll(number):
            redis_worker = RedisWorker(server.client(), ["f"], wid=f"w{number}")
            while jobs := redis_worker.take(1):
                found.extend(jobs)

        threads = [threading.Thread(target=poll, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == len(set(ids(found))) == 500

    def test_w34_priority_takes_precedence_over_the_order_of_functions(self, redis, naive):
        naive.run("a", "x", "low")
        naive.run("b", "x", "high")
        redis_worker = RedisWorker(redis, ["a", "b"], wid="w1")
        assert ids(redis_worker.take(5)) == [("b", "1"), ("a", "1")]

    def test_w34_functions_are_served_in_turn(self, redis, naive):
        for _ in range(10):
            naive.run("a", "x")
            naive.run("b", "x")
        redis_worker = RedisWorker(redis, ["a", "b"], wid="w1")
        assert {job.fn for _ in range(2) for job in redis_worker.take(1)} == {"a", "b"}

    def test_w35_fractional_times_become_due_and_infinite_ones_never(self, redis):
        redis.zadd("queue:f:scheduled", {1: 1.5, 2: float("inf")})
        assert [due(redis, now) for now in (1, 2, 9e18)] == [None, [b"queue:f:scheduled", b"1"], None]


class TestEnding:
    """Cases W13 to W19, W21, W22, W28, W32, W36."""

    def test_w13_progress_is_stored_in_two_fields_without_an_event(self, naive, redis_worker, redis, client, events):
        naive.run("f", "x")
        [job] = redis_worker.take(1)
        assert redis_worker.update(job, 3, 10)
        fields = redis.hgetall("job:f:1")
        assert (fields[b"status:dividend"], fields[b"status:divisor"]) == (b"3", b"10")
        assert (client.get("f", 1).dividend, client.get("f", 1).divisor) == (3, 10)
        assert events(2) == ["create:1", "start:1"]

    def test_w14_the_output_is_stored_before_the_finish_event(self, naive, work, redis, server):
        pubsub = server.client().pubsub(ignore_subscribe_messages=True)
        pubsub.subscribe("channel:f")
        work(f=lambda _: "OUT")
        naive.run("f", "x")
        wait_until(lambda: (pubsub.get_message(timeout=1) or {}).get("data") == b"finish:1")
        assert redis.hgetall("job:f:1") == {b"status": b"success", b"input": b"x", b"output": b"OUT"}
        assert 89_990 < redis.ttl("job:f:1") <= 90_000
        assert redis.lrange("lock:f:1", 0, -1) == [b"OK"]
        assert 8 < redis.ttl("lock:f:1") <= 10
        pubsub.close()

    def test_w15_a_blocking_naive_client_receives_the_finish_message(self, naive, work, redis):
        work(f=shout)
        naive.run("f", "x", blocking=True, timeout=5)
        assert naive.answer == (b"lock:f:1", b"OK")
        assert not redis.exists("lock:f:1")

    def test_w16_a_late_waiter_hangs_if_naive_and_returns_if_ours(self, naive, redis, redis_worker, client):
        naive.run("f", "x")
        redis_worker.finish(redis_worker.take(1)[0], Status.SUCCESS, b"y")
        assert redis.brpop("lock:f:1", 1) == (b"lock:f:1", b"OK")
        assert redis.brpop("lock:f:1", 1) is None
        _wait(client, "f", 1, timeout_s=0)

    def test_w17_one_message_releases_one_naive_waiter(self, redis, server):
        answers = []
        threads = [
            threading.Thread(target=lambda: answers.append(server.client().brpop("lock:f:1", 1))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(redis.client_list()) and redis.info("clients")["blocked_clients"] == 2)
        redis.lpush("lock:f:1", "OK")
        for thread in threads:
            thread.join()
        assert answers.count(None) == 1

    def test_w18_finishing_a_job_releases_all_our_waiters_at_once(self, redis, naive, redis_worker, client):
        naive.run("f", "x")
        [job] = redis_worker.take(1)
        returned = []

        def wait():
            _wait(client, "f", 1)
            returned.append(time.monotonic())

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: redis.info("clients")["blocked_clients"] == 3)
        ended_at = time.monotonic()
        redis_worker.finish(job, Status.SUCCESS, b"y")
        for thread in threads:
            thread.join()
        assert len(returned) == 3
        assert max(returned) - ended_at < 0.5
        assert 0 < redis.ttl("lock:f:1") <= 10

    @pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "5", True])
    def test_w19_an_invalid_timeout_is_rejected_before_anything_is_sent(self, redis, client, timeout):
        with pytest.raises(ResponseError, match="timeout is negative"):
            redis.brpop("lock:f:1", -1)
        with pytest.raises(ValueError, match="timeout: expected"):
            client.run("f", "x", "normal", [OPT_BLOCKING], timeout)
        assert redis.keys("*") == []

    @pytest.mark.parametrize("fn", ["", "a:b", "x" * 101, "a b", None])
    def test_an_invalid_function_is_rejected_before_anything_is_sent(self, redis, server, client, fn):
        for act in (lambda: client.run(fn, "x"), lambda: client.get(fn, 1), lambda: Worker(server.url).accept(fn)):
            with pytest.raises(ValueError, match="function: expected 1 to 100 characters"):
                act()
        assert redis.keys("*") == []

    @pytest.mark.parametrize(
        ("prio", "scheduled", "words"),
        [
            ("normal", 5, "scheduled: expected it with prio 'scheduled', and only there"),
            ("scheduled", None, "scheduled: expected it with prio 'scheduled', and only there"),
            ("scheduled", datetime(2030, 1, 1), "scheduled: expected an aware datetime"),  # noqa: DTZ001
        ],
    )
    def test_an_invalid_time_is_rejected_before_anything_is_sent(self, redis, client, prio, scheduled, words):
        with pytest.raises(ValueError, match=words):
            client.run("f", "x", prio, scheduled=scheduled)
        assert redis.keys("*") == []

    def test_a_time_is_a_number_or_an_aware_datetime_also_as_the_limit(self, redis, client):
        client.run("f", "x", "scheduled", scheduled=datetime(2030, 1, 1, tzinfo=UTC))
        client.run("f", "x", "scheduled", [], 1_893_456_000)
        assert redis.zrange("queue:f:scheduled", 0, -1, withscores=True) == [(b"1", 1.893456e9), (b"2", 1.893456e9)]

    @pytest.mark.parametrize("prio", ["urgent", "HIGH", "", None, 5, b"high", ["high"]])
    def test_an_unknown_priority_is_rejected_before_anything_is_sent(self, redis, client, prio):
        with pytest.raises(ValueError, match=r"prio: expected one of .*high.*, got"):
            client.run("f", "x", prio)
        assert redis.keys("*") == []

    def test_an_unknown_option_is_rejected_before_anything_is_sent(self, redis, client):
        with pytest.raises(ValueError, match="options: expected OPT_BLOCKING or OPT_ROLLCALL, got 'OPT_HURRY'"):
            client.run("f", "x", "normal", ["OPT_HURRY"])
        assert redis.keys("*") == []

    def test_options_may_be_a_generator(self, client):
        with pytest.raises(NoWorkers):
            client.run("f", "x", options=(option for option in [OPT_ROLLCALL]))

    def test_a_worker_without_a_function_does_not_start(self, server):
        with pytest.raises(ValueError, match="call accept first"):
            Worker(server.url).run()

    def test_a_job_of_a_worker_that_defines_no_work_fails_with_the_reason(self, work, client):
        work(f=None)
        client.run("f", "x", options=[OPT_BLOCKING], timeout=10)
        assert client.get("f", 1).text == (
            "NotImplementedError: Worker.work: expected a subclass to define it; it got 1 bytes"
        )

    def test_a_worker_knows_its_job_and_reports_its_progress(self, work, client):
        seen = []

        def count(_):
            worker.update(1, 4)
            seen.append((worker.job, client.get("f", 1)))
            for invalid in ((5, 4), (-1, 4), (0, 0), (1.5, 4), (True, 4)):
                with pytest.raises(ValueError, match="0 to divisor of divisor above 0"):
                    worker.update(*invalid)

        worker = work(f=count)
        worker.update(1, 4)  # without a job it has no effect
        client.run("f", "x", options=[OPT_BLOCKING], timeout=10)
        [(job, found)] = seen
        assert (job, found.dividend, found.divisor) == (("f", "1"), 1, 4)
        assert client.get("f", 1).status == Status.SUCCESS
        wait_until(lambda: worker.job is None)

    def test_a_status_that_no_peer_should_write_is_read_as_unknown(self, redis, client):
        redis.hset("job:f:9", mapping={"status": b"\xff", "status:dividend": "half", "status:divisor": "4"})
        job = client.get("f", 9)
        assert (job.status, job.dividend, job.divisor) == (Status.UNKNOWN, None, 4)

    def test_w21_workers_are_counted_while_they_run(self, redis, work):
        first, _ = work(f=shout), work(f=shout)
        wait_until(lambda: redis.get("count:f") == b"2")
        first.stop()
        wait_until(lambda: redis.get("count:f") == b"1")

    def test_w22_our_worker_never_makes_a_deleted_worker_count_negative(self, redis):
        naive = NaiveWorker(redis, "f", shout)
        naive.start()
        redis.delete("count:f")
        naive.exit()
        assert redis.get("count:f") == b"-1"
        redis.delete("count:f")
        redis_worker = RedisWorker(redis, ["f"], wid="w1")
        redis_worker.register()
        redis.delete("count:f")
        redis_worker.unregister()
        assert int(redis.get("count:f") or 0) == 0

    def test_w28_an_event_from_another_database_does_not_change_a_job(self, server, client, redis):
        client.run("f", "x")
        server.client(db=1).publish("channel:f", "finish:1")
        assert client.get("f", 1).status == Status.IDLE

    def test_w32_a_run_publishes_create_start_and_finish_events_in_order(self, events, client, work):
        work(f=shout)
        client.run("f", "x", options=[OPT_BLOCKING], timeout=10)
        assert events(3) == ["create:1", "start:1", "finish:1"]

    def test_w36_a_raised_exception_is_the_output_of_the_job(self, work, client, redis, events):
        def fail(_):
            raise ValueError("x")

        work(f=fail)
        client.run("f", "x", options=[OPT_BLOCKING], timeout=10)
        job = client.get("f", 1)
        assert (job.status, job.output) == (Status.ERROR, b"ValueError: x")
        assert 89_990 < redis.ttl("job:f:1") <= 90_000
        assert events(3)[-1] == "finish:1"
        assert redis.lrange("lock:f:1", 0, -1) == [b"OK"]


def _wait(client, fn, id, *, timeout_s=10):
    from django_faktory.contrib.gearmonkey import requests
    from django_faktory.contrib.gearmonkey.client import run_steps

    run_steps(client._redis, requests.wait(fn, id, timeout_s))
