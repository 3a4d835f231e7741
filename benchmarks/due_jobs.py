"""Measure how late scheduled jobs are: 10,000 due at once, and single ones, over the wire and with our own workers.

    python -m benchmarks.due_jobs               (PostgreSQL as it is configured; BENCH_DATABASE=sqlite for SQLite)
    python -m benchmarks.due_jobs --ended 20000000      (beside so many jobs that have ended and are kept; PostgreSQL)

Creates and empties the database of the other benchmarks; prints the machine and the settings first.
"""

import argparse
import json
import random
import statistics
import time
import uuid
from datetime import UTC, datetime

from benchmarks.client import Client
from benchmarks.database import empty, machine, prepare
from benchmarks.growth import insert_ended
from benchmarks.processes import node

JOBS = 10_000
LONE = 100
APART_S = 0.15


def job(at):
    return {"jid": uuid.uuid4().hex, "jobtype": "noop", "args": [], "at": datetime.fromtimestamp(at, UTC).isoformat()}


def many_at_once():
    """Return the seconds from the moment when all jobs are due until all are enqueued."""
    from django_faktory.models import Job

    at = time.time() + 8
    with node("--server-only") as (_, port):
        client = Client(port)
        for _ in range(0, JOBS, 1000):
            client.ask(f"PUSHB {json.dumps([job(at) for _ in range(1000)])}")
        client.close()
        waiting = Job.objects.filter(state="scheduled")
        assert waiting.count() == JOBS, "expected all jobs to wait when the time comes; the machine is too slow"
        time.sleep(max(0, at - time.time()))
        while waiting.exists():
            time.sleep(0.01)
        return time.time() - at


def lone_over_the_wire(ahead_s):
    """Return how late each FETCH was answered, in ms; each job is pushed `ahead_s()` seconds before it is due."""
    late = []
    with node("--server-only") as (_, port):
        pusher, fetcher = Client(port), Client.worker(port, "due-jobs")
        time.sleep(1)
        for _ in range(LONE):
            at = time.time() + ahead_s()
            pusher.ask(f"PUSH {json.dumps(job(at))}")
            while (given := fetcher.ask("FETCH default")) is None:
                pass
            late.append((time.time() - at) * 1000)
            fetcher.ask(f"ACK {json.dumps({'jid': json.loads(given)['jid']})}")
        pusher.close()
        fetcher.close()
    return late


def lone_with_own_workers():
    """Return how late each job started in a worker process of a node, in ms."""
    from benchmarks.tasks import now
    from django_faktory.models import Job

    with node("--processes", "1"):
        time.sleep(2)
        first = time.time() + 2
        due = {}
        for number in range(LONE):
            at = first + number * APART_S + random.uniform(0, 0.05)
            due[now.using(run_after=datetime.fromtimestamp(at, UTC)).enqueue().id] = at
        while Job.live.exists():
            time.sleep(0.1)
    ran = dict(Job.objects.filter(jid__in=due).values_list("jid", "result"))
    return [(float(ran[jid]) - at) * 1000 for jid, at in due.items()]


def shown(late):
    late = sorted(late)
    return (
        f"median {statistics.median(late):.0f}, 95 % {late[94]:.0f}, worst {late[-1]:.0f} ms (median at most 100 asked)"
    )


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.due_jobs")
    parser.add_argument("--ended", type=int, default=0, help="jobs that have ended and are kept")
    options = parser.parse_args()
    prepare()
    print(json.dumps(machine() | vars(options), indent=2))
    empty()
    insert_ended(options.ended)
    print(f"a lone job, own worker:                {shown(lone_with_own_workers())}")
    print(f"over the wire, 1 to 1.5 s ahead:       {shown(lone_over_the_wire(lambda: random.uniform(1, 1.5)))}")
    print(f"over the wire, 0.1 to 0.9 s ahead:     {shown(lone_over_the_wire(lambda: random.uniform(0.1, 0.9)))}")
    print(f"10,000 jobs due at once, all enqueued after: {many_at_once():.2f} s (at most 2 asked)")


if __name__ == "__main__":
    main()
