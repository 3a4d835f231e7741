"""Measure the physical limit: our statements on PostgreSQL without a server, a client or a job in between.

    python -m benchmarks.ceiling [--seconds 3]

Two connections alternate, as the server's connections do. Each turn ends some jobs, stores as many and claims as many,
in one message and one commit on disk. Only fewer commits per job can make a server faster than this. For each size of a
turn it prints jobs per second, and the CPU time per job of PostgreSQL's sessions and of this program.
"""

import argparse
import asyncio
import json
import time
import uuid

from benchmarks.database import empty, machine, prepare

SIZES = (1, 2, 5, 10, 25, 100)
WAITING = 1000
"""Number of jobs that always wait, so that there is one to claim."""


def cpu_s(pid):
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


class Turns:
    """One connection that executes turns of the same size, one after the other."""

    def __init__(self, connection, size, loop):
        from django_faktory.store.dialects.postgresql.loop_connection import PostgresqlLoopConnection

        self.size, self.claimed, self.done = size, [], 0
        connection.ensure_connection()
        self.backend = connection.connection.info.backend_pid
        self.connection = PostgresqlLoopConnection.take(connection)
        self.connection.start(loop)

    def calls(self):
        from django_faktory.core.payloads import Ack
        from django_faktory.store.dialects.postgresql.jobs import claim_calls, end_call
        from django_faktory.store.dialects.postgresql.push import push_call
        from django_faktory.store.dialects.values import ClaimPlan, ClaimSlot
        from django_faktory.store.jobs.pushes import order_jobs

        acks = [Ack(jid=jid, wid="ceiling") for jid in self.claimed]
        jobs = order_jobs(new_jobs(self.size))
        ends = [end_call(acks, None, [job.jid for _, job in jobs])] if acks else []
        plan = ClaimPlan([ClaimSlot("default", "ceiling", self.size)], self.size, claim=1)
        claims, read = claim_calls(plan, None, is_lazy=False, is_own=True)
        return [*ends, push_call(jobs, None, may_exist=True), *claims], read, len(ends) + 1

    async def run(self):
        while True:
            calls, read, claims_from = self.calls()
            found = await self.connection.execute(calls)
            self.done += len(self.claimed)
            self.claimed = [job.jid for job in read(found[claims_from:])]


def new_jobs(count):
    from django_faktory.core.payloads import JobPayload

    text = '{"jobtype":"noop","args":[1,"string",3],"created_at":"2026-11-22T00:00:00Z","queue":"default","retry":5}'
    return [JobPayload(jid=uuid.uuid4().hex, jobtype="noop", queue="default", text=text) for _ in range(count)]


def turns_of(size, seconds):
    """Return jobs per second, and microseconds of CPU per job: PostgreSQL's and this program's."""
    from django.db import connections

    from django_faktory.brokers.orm import OrmBroker
    from django_faktory.core.event_loop import new_event_loop

    empty()
    OrmBroker("default").push(new_jobs(WAITING))
    loop = new_event_loop()
    pair = [Turns(connections.create_connection("default"), size, loop) for _ in range(2)]

    async def measure():
        running = [asyncio.create_task(turns.run()) for turns in pair]
        await asyncio.sleep(1)  # to warm up
        begun, before = time.monotonic(), totals(pair)
        await asyncio.sleep(seconds)
        lasted, after = time.monotonic() - begun, totals(pair)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return lasted, *(now - then for now, then in zip(after, before, strict=True))

    lasted, done, backends, ours = loop.run_until_complete(measure())
    loop.close()
    return round(done / lasted), round(backends / done * 1e6), round(ours / done * 1e6)


def totals(pair):
    """Return the jobs done, and the CPU seconds of PostgreSQL's sessions and of this program."""
    return sum(turns.done for turns in pair), sum(cpu_s(turns.backend) for turns in pair), time.process_time()


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ceiling")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each size, and three rounds")
    options = parser.parse_args()
    prepare()
    print(json.dumps(machine(), indent=2), flush=True)
    found = {size: [] for size in SIZES}
    for _ in range(3):
        for size in SIZES:
            found[size].append(turns_of(size, options.seconds))
    print("\n| jobs a turn | jobs/s | PostgreSQL, µs a job | this program, µs a job |\n|---:|---:|---:|---:|")
    for size, rounds in found.items():
        jobs, backends, ours = sorted(rounds)[1]
        print(f"| {size} | {jobs:,} | {backends} | {ours} |")


if __name__ == "__main__":
    main()
