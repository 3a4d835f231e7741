"""Measure the physical limit: our statements on PostgreSQL without a server, a client or a job in between.

    python -m benchmarks.ceiling [--seconds 3]

Two connections alternate, as the server's connections do. Each turn ends some jobs, stores as many and claims as many,
in one message and one commit on disk. Only fewer commits per job can make a server faster than this. For each size of a
turn it prints jobs per second, and the CPU time per job of PostgreSQL's sessions and of this program.
"""

import argparse
import json
import select
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
    """One connection that sends turns of the same size, one after the other."""

    def __init__(self, connection, size):
        from django_faktory.store.dialects.postgresql.prepared import PreparedSession

        self.connection, self.size = connection, size
        self.claimed, self.done = [], 0
        connection.ensure_connection()
        self.session = PreparedSession.of(connection)
        self.fd = connection.connection.pgconn.socket
        self.backend = connection.connection.info.backend_pid

    def calls(self):
        from django_faktory.core.payloads import Ack
        from django_faktory.store.dialects.postgresql.jobs import claim_calls, end_call
        from django_faktory.store.dialects.postgresql.push import push_call
        from django_faktory.store.dialects.values import ClaimPlan, ClaimSlot
        from django_faktory.store.jobs.pushes import order_jobs

        acks = [Ack(jid=jid, wid="ceiling") for jid in self.claimed]
        jobs = order_jobs(new_jobs(self.size))
        ends = [end_call(self.connection, acks, None, [job.jid for _, job in jobs])] if acks else []
        plan = ClaimPlan([ClaimSlot("default", "ceiling", self.size)], self.size, claim=1)
        return [*ends, push_call(jobs, None, may_exist=True), *claim_calls(plan, None, is_lazy=False)]

    def read(self, found):
        from django_faktory.store.dialects.postgresql.rows import reservations

        self.done += len(self.claimed)
        self.claimed = [job.jid for job in reservations(found[-1:])]

    def begin(self):
        """Send a turn. Until its commands are prepared, run the turn synchronously and send another one."""
        from django_faktory.store.dialects.postgresql.prepared import execute_on

        while True:
            calls = self.calls()
            self.flight = self.session.begin(calls, lambda found: self.read(found) or True, fail)
            if self.flight is not None:
                return
            self.read(execute_on(self.connection, calls))


def fail(error):
    raise error


def new_jobs(count):
    from django_faktory.core.payloads import JobPayload

    text = '{"jobtype":"noop","args":[1,"string",3],"created_at":"2026-11-22T00:00:00Z","queue":"default","retry":5}'
    return [JobPayload(jid=uuid.uuid4().hex, jobtype="noop", queue="default", text=text) for _ in range(count)]


def turns_of(size, seconds):
    """Return jobs per second, and microseconds of CPU per job: PostgreSQL's and this program's."""
    from django.db import connections

    from django_faktory.brokers.orm import OrmBroker

    empty()
    OrmBroker("default").push(new_jobs(WAITING))
    pair = [Turns(connections.create_connection("default"), size) for _ in range(2)]
    for turns in pair:
        turns.begin()
    poll, by_fd = select.poll(), {turns.fd: turns for turns in pair}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    begun, until = None, time.monotonic() + 1  # a second to warm up
    while time.monotonic() < until:
        for fd, _ in poll.poll(1000):
            turns = by_fd[fd]
            if turns.flight.read():
                turns.begin()
        if begun is None and time.monotonic() >= until:
            begun, until = time.monotonic(), until + seconds
            before = [turns.done for turns in pair], [cpu_s(turns.backend) for turns in pair], time.process_time()
    lasted = time.monotonic() - begun
    done = sum(turns.done for turns in pair) - sum(before[0])
    backends = sum(cpu_s(turns.backend) for turns in pair) - sum(before[1])
    ours = time.process_time() - before[2]
    for turns in pair:
        while not turns.flight.read():
            poll.poll(1000)
        turns.connection.close()
    return round(done / lasted), round(backends / done * 1e6), round(ours / done * 1e6)


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
