"""Measure retention of a day of ended jobs, midnight beside a dump, and PUSH with much history.

    python -m benchmarks.history                            (all parts, at the sizes below)
    python -m benchmarks.history --retention 100000         (this part only, smaller)
    BENCH_DATABASE=mariadb python -m benchmarks.history --retention 100000

`retention`: seconds until a day of so many jobs has left, and on PostgreSQL the bytes of its log. `midnight`: a dump is
open for so many seconds, while jobs end, days are added and one is due; the slowest statements, and the days that
exist. `push`: PUSH with no history, and with so many days of it. Every reading is in results/history.json.
"""

import argparse
import json
import statistics
import threading
import time
from datetime import UTC, timedelta
from functools import partial

from benchmarks.database import HERE, empty, machine, prepare
from benchmarks.growth import ask

SIZES = {"retention": 1_000_000, "midnight": 60, "push": 400}
PORTION = 100_000
ROUNDS = 9
PUSHES = 300

COLUMNS = """id, day, jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for, backtrace, result_ttl,
  result, finished_at, purge_at"""
VALUES = """'benchmarks.tasks.noop', 'default', 'succeeded', 0, repeat('x', 250), 25, 1800, 0, 86400, '"done"'"""
ROWS = {
    "postgresql": f"""INSERT INTO django_faktory_history ({COLUMNS})
SELECT 1000000000 + n, %s, 'job-' || n, {VALUES}, now(), %s FROM generate_series({{}}, {{}}) AS n""",
    "mysql": f"""INSERT INTO django_faktory_history ({COLUMNS}, errtype, failure, history)
SELECT 1000000000 + seq, %s, CONCAT('job-', seq), {VALUES},
  UTC_TIMESTAMP(6), %s, '', '', '' FROM seq_{{}}_to_{{}}""",
}


def today():
    from django.utils import timezone

    return timezone.now().astimezone(UTC).date()


def partitions():
    from django.db import connection

    from django_faktory.store.dialects import dialect_of

    return dialect_of(connection).partitions


def fill(count, day, *, due_in, first=1):
    """Insert ended jobs of this day, in portions."""
    from django.db import connection
    from django.utils import timezone

    purge_at = (timezone.now() + due_in).replace(tzinfo=None if connection.vendor == "mysql" else UTC)
    for start in range(first, first + count, PORTION):
        end = min(start + PORTION, first + count) - 1
        ask(ROWS[connection.vendor].format(start, end), [day, purge_at])


def retire(**options):
    from django_faktory.store.maintenance.retention import Retention
    from django_faktory.store.store import Store

    Retention(Store(**options)).run()


def retention(size, **_):
    """Return how long a day of `size` jobs takes to leave, and what it writes to the log."""
    from django.db import connection

    empty()
    day = today() - timedelta(days=3)
    retire()  # the days ahead
    if connection.vendor == "mysql":  # partitions are added at the end only
        ends = [day + timedelta(days=age) for age in range(19)]
        texts = ", ".join(f"PARTITION d{end - timedelta(days=1):%Y%m%d} VALUES LESS THAN ('{end}')" for end in ends)
        ask(f"ALTER TABLE django_faktory_history PARTITION BY RANGE COLUMNS (day) ({texts})")
    else:
        partitions().add(connection, day, day + timedelta(days=1))
    fill(size, day, due_in=-timedelta(seconds=1))
    wal = ask("SELECT pg_current_wal_insert_lsn()")[0] if connection.vendor == "postgresql" else None
    began = time.perf_counter()
    retire()
    found = {"jobs": size, "seconds": round(time.perf_counter() - began, 3)}
    if wal:
        [written] = ask("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s)", [wal])
        found["wal_kb"] = round(float(written) / 1024)
    assert ask("SELECT COUNT(*) FROM django_faktory_history")[0] == 0
    return found


def midnight(seconds, **_):
    """End jobs beside an open dump, while days are added and one is due, every second."""
    from django.db import connection, connections
    from django.utils import timezone

    empty()
    old = today() - timedelta(days=2)
    partitions().add(connection, old, old + timedelta(days=1))
    fill(1000, old, due_in=-timedelta(seconds=1))
    found, phase, stopping = {}, "before", threading.Event()

    def use(name, work):
        while not stopping.is_set():
            began = time.perf_counter()
            work()
            key = f"{phase}: slowest {name}, ms"
            found[key] = max(found.get(key, 0), round((time.perf_counter() - began) * 1000, 1))
            time.sleep(0.002)
        connections.close_all()

    reading = partial(ask, "SELECT 1 FROM django_faktory_history WHERE jid = 'no'")
    threads = [threading.Thread(target=use, args=item) for item in (("end", end_one), ("read", reading))]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    dump = connection.copy()
    dump.set_autocommit(False)
    with dump.cursor() as cursor:
        cursor.execute("SELECT COUNT(*) FROM django_faktory_history")
        phase = "beside a dump"
        for second in range(seconds):
            retire(now=timezone.now() + timedelta(days=second % 3))  # midnight again and again
            time.sleep(1)
        stopping.set()
        for thread in threads:
            thread.join()
    dump.close()
    return found | {"days ahead": sum(one.end > today() for one in partitions().read(connection))}


def end_one():
    import uuid

    from django_faktory.core import payloads
    from django_faktory.core.payloads import Ack, FetchRequest
    from django_faktory.store.jobs import acknowledgements, claims, pushes
    from django_faktory.store.store import Store

    store = Store()
    pushes.push(store, [payloads.new_job(jid=uuid.uuid4().hex, jobtype="noop", args=[], result_ttl=600)])
    [[job]] = claims.fetch(store, [FetchRequest(queues=("default",), wid="w1")])
    acknowledgements.ack(store, [Ack(jid=job.jid, wid="w1", attempt=job.attempt)])


def push(days, *, jobs, **_):
    """Return µs of a PUSH with no history, and with `days` days of it in as many partitions as it needs."""
    from django.db import connection

    empty()
    without = push_us()
    first = today() - timedelta(days=days)
    width = timedelta(days=max(1, -(-days // 42)))
    while first < today():
        end = min(first + width, today())
        partitions().add(connection, first, end)
        first = end
    for number, one in enumerate(partitions().read(connection)[1:]):
        fill(jobs, one.first, due_in=timedelta(days=days), first=1 + number * jobs)
    ask("ANALYZE")
    used = len(partitions().read(connection))
    return {"days": days, "partitions": used, "without_us": without, "with_us": push_us()}


def push_us():
    import uuid

    from django_faktory.core import payloads
    from django_faktory.store.jobs import pushes
    from django_faktory.store.store import Store

    store, medians = Store(), []
    for _ in range(ROUNDS):
        taken = []
        for _ in range(PUSHES):
            job = payloads.new_job(jid=uuid.uuid4().hex, jobtype="noop", args=[])
            began = time.perf_counter()
            pushes.push(store, [job])
            taken.append(time.perf_counter() - began)
        medians.append(statistics.median(taken))
    return round(min(medians) * 1e6, 1)


PARTS = {"retention": retention, "midnight": midnight, "push": push}


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.history", description="No part named: all of them.")
    for name, unit in {"retention": "JOBS", "midnight": "SECONDS", "push": "DAYS"}.items():
        parser.add_argument(f"--{name}", type=int, nargs="?", const=SIZES[name], metavar=unit)
    parser.add_argument("--jobs", type=int, default=5000, help="of each partition of --push")
    options = vars(parser.parse_args())
    chosen = {name: options[name] for name in PARTS if options[name] is not None} or SIZES
    prepare()
    about = machine()
    print(json.dumps(about | {"sizes": chosen}, indent=2), flush=True)
    found = {}
    for name, size in chosen.items():
        found[name] = PARTS[name](size, **options)
        print(name, found[name], flush=True)
    (HERE / "results" / "history.json").write_text(json.dumps({"machine": about, "found": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
