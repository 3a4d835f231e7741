"""Compare our GearMonkey worker with a naive one: jobs per second, and the duration of a blocking run.

    python -m benchmarks.gearmonkey            (Redis at REDIS_URL, database 15 by default: it is emptied)

The naive worker sends the specification's commands one by one. No worker does anything with a job. They alternate, each
in its own process, with the same naive client.
"""

import json
import multiprocessing
import os
import statistics
import time

from redis import Redis

from benchmarks.database import machine, prepare

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/15")
JOBS, RUNS, ROUNDS = 3000, 300, 3
INPUT = '[1, "text"]'


def main():
    prepare()
    print(json.dumps(machine(), indent=2))
    found = {worker.__name__: [] for worker in (naive, ours, ours_with_tasks)}
    for _ in range(ROUNDS):
        for worker in (naive, ours, ours_with_tasks):
            found[worker.__name__].append(measured(worker))
    for name, readings in found.items():
        rate, ms = (statistics.median(column) for column in zip(*readings, strict=True))
        print(f"{name:16} {rate:8.0f} jobs/s   blocking run {ms:6.2f} ms", flush=True)


def measured(worker):
    """Return jobs per second of a backlog, and the median of a naive client's blocking runs in milliseconds."""
    with Redis.from_url(URL, socket_timeout=None) as redis:
        redis.flushdb()
        process = multiprocessing.get_context("spawn").Process(target=worker)
        process.start()
        try:
            spans = [run(redis) for _ in range(RUNS)]
            return drained(redis), statistics.median(spans[RUNS // 10 :]) * 1000
        finally:
            process.terminate()
            process.join()


def drained(redis):
    """Create all jobs in one transaction; return jobs per second from then until the last job has ended."""
    pipeline = redis.pipeline()
    for number in range(RUNS + 1, RUNS + JOBS + 1):
        pipeline.hset(f"job:noop:{number}", mapping={"status": "idle", "input": INPUT})
        pipeline.lpush("queue:noop:normal", number)
    pipeline.set("uid:noop", RUNS + JOBS)
    pipeline.publish("channel:noop", f"create:{RUNS + JOBS}")
    pipeline.execute()
    begun = time.perf_counter()
    while redis.hget(f"job:noop:{RUNS + JOBS}", "status") != b"success":
        time.sleep(0.002)
    return JOBS / (time.perf_counter() - begun)


def run(redis):
    begun = time.perf_counter()
    number = redis.incr("uid:noop")
    redis.hset(f"job:noop:{number}", mapping={"status": "idle", "input": INPUT})
    redis.publish("channel:noop", f"create:{number}")
    redis.lpush("queue:noop:normal", number)
    redis.brpop(f"lock:noop:{number}", 0)
    return time.perf_counter() - begun


def naive():
    from tests.contrib.gearmonkey.naive import NaiveWorker

    worker = NaiveWorker(Redis.from_url(URL, socket_timeout=None), "noop", lambda _: "")
    worker.start()
    worker.run()


def ours():
    import django

    django.setup()
    from django_faktory.contrib.gearmonkey import Worker

    worker = Worker(URL)
    worker.accept("noop", lambda _: "")
    worker.run()


def ours_with_tasks():
    import django

    django.setup()
    from benchmarks.tasks import noop
    from django_faktory.contrib.gearmonkey.address import connect
    from django_faktory.contrib.gearmonkey.broker import QUEUE, GearMonkeyBroker
    from django_faktory.contrib.gearmonkey.notifications import ChannelListener
    from django_faktory.contrib.gearmonkey.redis_worker import RedisWorker
    from django_faktory.worker.worker import Worker

    redis_worker = RedisWorker(connect(URL), ["noop"], wid="benchmark")
    broker = GearMonkeyBroker(redis_worker, {"noop": noop.jobtype})
    Worker(
        broker,
        wid="benchmark",
        queues=[QUEUE],
        listen=lambda: ChannelListener(redis_worker.redis, redis_worker.fns),
        beat_interval=5,
        max_prefetch=0,
    ).run()


if __name__ == "__main__":
    main()
