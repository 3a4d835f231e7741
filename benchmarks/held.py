"""Measure jobs that are offered at a rate beside an open transaction, what a job writes to the log, and late starts.

    python -m benchmarks.held                                  (all four parts, at the sizes below)
    python -m benchmarks.held --offered 60 --rate 3000 --holds reader --log 20000

PostgreSQL only, with its autovacuum on, on this machine. Every reading is in results/held.json. See README.md.
"""

import argparse
import json
import statistics
import threading
import time
from contextlib import contextmanager

from benchmarks.client import Client
from benchmarks.database import HERE, empty, machine, prepare
from benchmarks.growth import ask, insert, insert_ended, open_snapshot, processed
from benchmarks.processes import node, workers
from benchmarks.scaling import Meter, postmaster

SIZES = {"offered": 240, "log": 50_000, "info": 300_000, "late": 20}
BEFORE_S, AFTER_S = 30.0, 40.0
TICK_S = 0.01
DEPTH = 4000
SETTLING_S = 3.0
ASKED = 20
CLAIMED_S = 10.0
"""A worker that sends no BEAT for 60 s counts as lost."""
TEXT = "x" * 256
WID = "bench-0123456789abcdef"

PICK_UP = """
SELECT COUNT(*), percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY EXTRACT(epoch FROM started_at - enqueued_at))
FROM django_faktory_history WHERE enqueued_at >= %s AND enqueued_at < %s
"""


def clock():
    return ask("SELECT clock_timestamp()")[0]


def log_bytes():
    return int(ask("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")[0])


class Producer(threading.Thread):
    """Enqueues jobs at a rate, a few at a time, or keeps a queue at a depth; on a connection of its own."""

    def __init__(self, *, rate=None, depth=None):
        super().__init__(daemon=True)
        self._rate, self._depth = rate, depth
        self._is_over, self._error = threading.Event(), None
        self.enqueued = 0

    def run(self):
        from benchmarks.tasks import noop

        began, first = time.perf_counter(), processed()
        try:
            while not self._is_over.wait(TICK_S):
                due = (time.perf_counter() - began) * self._rate if self._rate else self._depth + processed() - first
                if (count := int(due) - self.enqueued) > 0:
                    noop.enqueue_many([(number, TEXT) for number in range(count)])
                    self.enqueued += count
        except Exception as error:  # noqa: BLE001 (the main thread reports it)
            self._error = error

    def stop(self):
        self._is_over.set()
        self.join(30)
        if self._error:
            raise self._error


@contextmanager
def producing(**how):
    producer = Producer(**how)
    producer.start()
    try:
        yield producer
    finally:
        producer.stop()


def offered(seconds, *, rate, holds, **_):
    """Measure pick-up, processor time and backlog before, while and after a transaction of another session is open."""
    empty()
    with workers("--queues", "default", "--concurrency", "16") as process, producing(rate=rate) as producer:
        phases = Phases(process.pid, producer)
        time.sleep(SETTLING_S)
        phases.take("before", BEFORE_S)
        with open_snapshot(writes=holds == "writer"):
            for _ in range(4):
                phases.take("held", seconds / 4)
        phases.take("after", AFTER_S)
    return {"holds": holds, "rate": rate, "phases": phases.found}


class Phases:
    """The figures of one phase after the other."""

    def __init__(self, pid, producer):
        self._pid, self._server, self._producer, self.found = pid, postmaster(), producer, []

    def take(self, name, seconds):
        since, meter = clock(), Meter([self._pid], self._server)
        time.sleep(seconds)
        lasted, used, _ = meter.read()
        until = clock()
        waiting = ask("SELECT COUNT(*) FROM django_faktory_job WHERE enqueued_at < %s", [until])[0]
        count, (p50, p99) = ask(PICK_UP, [since, until])
        dead = ask("SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'django_faktory_job'")[0]
        reading = {"phase": name, "seconds": round(lasted), "jobs_per_s": round(count / lasted)}
        reading |= {"p50_ms": round(p50 * 1000, 1), "p99_ms": round(p99 * 1000, 1), "backlog": waiting, "dead": dead}
        reading |= {f"{part}_cores": round(cpu_s / lasted, 2) for part, cpu_s in used.items()}
        self.found.append(reading)
        print(reading, flush=True)


def log(jobs, *, size, **_):
    """Return the bytes of PostgreSQL's log that a job writes: by part, in sets of `size`, and in workers under load."""
    found = {kept: log_by_part(size, keep_s) for kept, keep_s in {"kept": 600, "deleted": None}.items()}
    empty()
    ask("CHECKPOINT")
    with workers("--queues", "default", "--concurrency", "32"), producing(depth=DEPTH):
        time.sleep(SETTLING_S)
        written, began, before = log_bytes(), time.perf_counter(), processed()
        while (done := processed() - before) < jobs:
            time.sleep(0.1)
        found["workers"] = {"bytes": round((log_bytes() - written) / done)}
        found["workers"]["jobs_per_s"] = round(done / (time.perf_counter() - began))
    print(found, flush=True)
    return found


def log_by_part(size, keep_s):
    """Return the median bytes that one job writes when it is pushed, claimed and ended, in sets."""
    from django_faktory.core.payloads import JobTemplate
    from django_faktory.tasks.job_id import new_jids

    def push():
        return own_broker().push([template.job(jid, [1, TEXT]) for jid in new_jids(size)])

    empty()
    template = JobTemplate(jobtype="benchmarks.tasks.noop", result_ttl=keep_s)
    parts = {"push": push, "claim": lambda: claimed.extend(claim("default", size)), "end": lambda: end(claimed)}
    found = {part: [] for part in parts}
    for _ in range(100):
        claimed = []
        for part, act in parts.items():
            before = log_bytes()
            act()
            found[part].append((log_bytes() - before) / size)
    return {part: round(statistics.median(values)) for part, values in found.items()}


def info(waiting, *, snapshot_s, ended, **_):
    """Return the milliseconds of INFO: with some jobs, with many, and after an open snapshot at 800 jobs/s."""
    found = {}
    for count in (waiting // 15, waiting):
        empty()
        insert_ended(ended)
        insert(count)
        with node("--server-only") as (_, port):
            found[f"{count} waiting"] = ask_info(port)
    empty()
    with node("--queues", "default") as (_, port), producing(rate=800), open_snapshot():
        time.sleep(snapshot_s)
        found[f"after a snapshot of {snapshot_s} s"] = ask_info(port)
    print(found, flush=True)
    return found


def ask_info(port):
    time.sleep(SETTLING_S)
    client, times = Client(port), []
    for _ in range(ASKED):
        began = time.perf_counter()
        client.ask("INFO")
        times.append((time.perf_counter() - began) * 1000)
        time.sleep(0.1)
    client.close()
    return {"p50_ms": round(statistics.median(times), 1), "max_ms": round(max(times), 1)}


def late(times, *, held_s, **_):
    """Return by how many ms jobs start after the commit that makes them ready, at a place that claims have passed.

    This process is another node. Workers run other jobs meanwhile, so that their claims begin behind these places.
    """
    empty()
    with workers("--queues", "default") as _process, producing(rate=200):
        time.sleep(SETTLING_S)
        found = {kind: measure(times, held_s) for kind, measure in LATE.items()}
    print(found, flush=True)
    return found


def released(times, held_s):
    claimed, deadline = [], time.monotonic() + 60
    while len(claimed) < times and time.monotonic() < deadline:
        claimed += claim("default", 1)
    time.sleep(min(held_s, CLAIMED_S))
    return lateness([(job.jid, at) for job in claimed for at in [clock()] if own_broker().release([job])])


def handed_a_lock(times, held_s):
    from benchmarks.tasks import locked

    calls = [(number, "x") for number in range(times)]
    locked.using(queue_name="mine").enqueue_many(calls)
    holders = {json.loads(job.text)["args"][0]: job for job in claim("mine", times)}
    behind = {call[0]: job.id for call, job in zip(calls, locked.enqueue_many(calls), strict=True)}
    time.sleep(min(held_s, CLAIMED_S))
    readied = []
    for number, job in holders.items():
        readied.append((behind[number], clock()))
        end([job])
    return lateness(readied)


def committed_late(times, held_s):
    from django.db import transaction

    from benchmarks.tasks import noop

    with transaction.atomic():
        jobs = noop.enqueue_many([(number, "x") for number in range(times)])
        time.sleep(held_s)
        at = clock()
    return lateness([(job.id, at) for job in jobs])


LATE = {"released by another node": released, "handed a lock": handed_a_lock, "committed late": committed_late}


def lateness(readied):
    """Wait until the jobs have run, and return by how much they started after the times at which they became ready."""
    from django_faktory.models import Job

    jids = [jid for jid, _ in readied]
    deadline = time.monotonic() + 60
    while (done := Job.objects.succeeded().filter(jid__in=jids)).count() < len(jids):
        if time.monotonic() > deadline:
            raise RuntimeError(f"expected {len(jids)} jobs to run within 60 s, got {done.count()}")
        time.sleep(0.1)
    started = dict(done.values_list("jid", "started_at"))
    times = [(started[jid] - at).total_seconds() * 1000 for jid, at in readied]
    return {"p50_ms": round(statistics.median(times), 1), "max_ms": round(max(times), 1)}


def own_broker():
    from django_faktory.brokers.orm import OrmBroker

    return OrmBroker("default")


def claim(queue, count):
    from django_faktory.core.payloads import FetchRequest

    [claimed] = own_broker().fetch([FetchRequest(queues=(queue,), count=count, wid=WID)])
    return claimed


def end(jobs):
    from django_faktory.core.payloads import Ack

    own_broker().ack([Ack(jid=job.jid, wid=job.wid, attempt=job.attempt, result="null") for job in jobs])


PARTS = {"offered": offered, "log": log, "info": info, "late": late}


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.held", description="No part named: all of them.")
    for name, unit in {"offered": "SECONDS", "log": "JOBS", "info": "JOBS", "late": "JOBS"}.items():
        parser.add_argument(f"--{name}", type=int, nargs="?", const=SIZES[name], metavar=unit)
    parser.add_argument("--rate", type=int, default=800, help="of --offered: jobs/s")
    parser.add_argument("--holds", choices=["reader", "writer"], default="writer", help="of --offered: what is open")
    parser.add_argument("--size", type=int, default=50, help="of --log: jobs in a set")
    parser.add_argument("--ended", type=int, default=0, help="of --info: jobs that have ended and are kept")
    parser.add_argument("--snapshot-s", type=int, default=240, help="of --info: age of the snapshot")
    parser.add_argument("--held-s", type=float, default=3.0, help="of --late: how long a job is held or uncommitted")
    options = vars(parser.parse_args())
    chosen = {name: options[name] for name in PARTS if options[name] is not None} or SIZES
    prepare()
    about = machine() | {name: ask(f"SHOW {name}")[0] for name in ("autovacuum", "wal_level", "checkpoint_timeout")}
    print(json.dumps(about | options, indent=2), flush=True)
    found = {name: PARTS[name](size, **options) for name, size in chosen.items()}
    text = json.dumps({"machine": about, "options": options, "found": found}, indent=2)
    (HERE / "results" / "held.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
