"""Compare `enqueue()` with a bare ORM `create()` of the same row: in a transaction, and alone.

    python -m benchmarks.enqueue            (PostgreSQL; BENCH_DATABASE=sqlite for SQLite)

Both write the same columns of the same table, and alternate every 100 calls in one run; ratios are medians over these
rounds. Then jobs with options alternate with plain ones; no two of them share a lock or a unique key.
"""

import itertools
import json
import statistics
import time
from contextlib import nullcontext

from benchmarks.database import empty, machine, prepare

TURNS = 30
CALLS = 100
MANY = 5000
TEXT = (
    '{"jid":"%s","jobtype":"benchmarks.tasks.noop","queue":"default","args":[42,"text"],"retry":25,'
    '"created_at":"2026-11-21T10:00:00.000000Z","custom":{"result_ttl":86400}}'
)


def main():
    prepare()
    print(json.dumps(machine(), indent=2))
    for in_transaction in (True, False):
        empty()
        for call in (bare, ours):
            timed(call, in_transaction)
        turns = [(timed(bare, in_transaction), timed(ours, in_transaction)) for _ in range(TURNS)]
        where = "in a transaction" if in_transaction else "alone, autocommit"
        bare_us, ours_us = (statistics.median(column) for column in zip(*turns, strict=True))
        ratio = statistics.median(ours / bare for bare, ours in turns)
        print(f"{where}: create() {bare_us:.0f} µs, enqueue() {ours_us:.0f} µs, ratio {ratio:.2f}")
    with_options()


def with_options():
    from benchmarks import tasks

    kinds = [tasks.noop, tasks.expiring, tasks.locked, tasks.unique]
    numbers = itertools.count()
    alone, many = [], []
    for _ in range(TURNS // 3):
        empty()
        alone.append([timed(lambda task=task: task.enqueue(next(numbers), "text"), False) for task in kinds])
        many.append([MANY / seconds(lambda task=task: task.enqueue_many(some(numbers))) for task in kinds])
    for task, us, per_s in zip(kinds, zip(*alone, strict=True), zip(*many, strict=True), strict=True):
        print(f"{task.name}: enqueue() {statistics.median(us):.0f} µs, enqueue_many {statistics.median(per_s):,.0f}/s")


def some(numbers):
    return [(number, "text") for number in itertools.islice(numbers, MANY)]


def seconds(call):
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def bare():
    from django.utils import timezone

    from django_faktory.models import Job
    from django_faktory.tasks.job_id import new_jid

    jid = new_jid()
    Job.objects.create(
        jid=jid,
        jobtype="benchmarks.tasks.noop",
        queue="default",
        state="enqueued",
        payload=TEXT % jid,
        retry=25,
        reserve_for=1800,
        result_ttl=86_400,
        enqueued_at=timezone.now(),
    )


def ours():
    from benchmarks.tasks import noop

    noop.enqueue(42, "text")


def timed(call, in_transaction):
    """Return the microseconds per call."""
    from django.db import transaction

    begun = time.perf_counter()
    with transaction.atomic() if in_transaction else nullcontext():
        for _ in range(CALLS):
            call()
    return (time.perf_counter() - begun) / CALLS * 1e6


if __name__ == "__main__":
    main()
