"""Measure drain and FETCH as a database grows: with a backlog, after many jobs, with an open snapshot, during a purge.

    python -m benchmarks.growth                                (all four parts, at the sizes below)
    python -m benchmarks.growth --backlog 100000 --snapshot 20 (these parts only, smaller)

PostgreSQL only, with its autovacuum on: without it every table that changes becomes slow, and the run prints a warning.
Every reading is in results/growth.json.
"""

import argparse
import json
import time
from contextlib import contextmanager

from benchmarks.database import HERE, empty, machine, prepare
from benchmarks.peers.arithmetic import median
from benchmarks.probe import Probe
from benchmarks.processes import node, workers

SIZES = {"backlog": 1_000_000, "done": 10_000_000, "snapshot": 60, "purge": 1_000_000}
FETCHES_S = 5.0
READING_S = 2.0
CHUNK = 500_000

INSERT = """
INSERT INTO django_faktory_job (jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for, backtrace,
    result_ttl, enqueued_at, finished_at, purge_at)
SELECT jid, 'benchmarks.tasks.noop', %(queue)s, %(state)s, 0,
    '{"jid":"' || jid || '","jobtype":"benchmarks.tasks.noop","args":[' || n || ',"x"],"queue":"' || %(queue)s || '"}',
    25, 1800, 0, %(keep_s)s, clock_timestamp(),
    CASE %(state)s WHEN 'dead' THEN now() END,
    CASE %(state)s WHEN 'dead' THEN now() + make_interval(secs => %(purge_in_s)s) END
FROM (SELECT n, md5(n::text || clock_timestamp()::text) AS jid FROM generate_series(1, %(count)s) AS n) AS made
"""

INSERT_ENDED = """
INSERT INTO django_faktory_history (id, day, jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for,
    backtrace, result_ttl, enqueued_at, started_at, finished_at, purge_at, attempt, result)
SELECT nextval(pg_get_serial_sequence('django_faktory_job', 'id')), current_date, md5(n::text || now()::text),
    'benchmarks.tasks.noop', 'default', 'succeeded', 0, repeat('x', 250), 25, 1800, 0, 864000, now(), now(), now(),
    now() + interval '10 d', 1, 'null'
FROM generate_series(1, %(count)s) AS n
"""

SIZE = """
SELECT pg_table_size('django_faktory_job') / 1048576.0, pg_indexes_size('django_faktory_job') / 1048576.0,
  pg_relation_size('faktory_ready') / 1048576.0, n_dead_tup, n_live_tup, autovacuum_count + vacuum_count
FROM pg_stat_user_tables WHERE relname = 'django_faktory_job'
"""


def ask(sql, values=None):
    """Run one statement; return its first row, or None if it returns no rows."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return cursor.fetchone() if cursor.description else None


def insert(count, queue="default", *, state="enqueued", keep_s=None, purge_in_s=86_400):
    """Insert `count` jobs with one statement, and update the statistics as in a database that has run for a while."""
    values = {"count": count, "queue": queue, "state": state, "keep_s": keep_s, "purge_in_s": purge_in_s}
    if count:
        ask(INSERT, values)
        ask("ANALYZE django_faktory_job")


def insert_ended(count):
    """Insert `count` jobs that have succeeded today and are kept."""
    for done in range(0, count, CHUNK):
        ask(INSERT_ENDED, {"count": min(CHUNK, count - done)})
    if count:
        ask("VACUUM ANALYZE django_faktory_history")


def sizes():
    """Return the sizes, rows and vacuums of the table of jobs, from the database's statistics."""
    table, indexes, ready, dead, live, vacuums = ask(SIZE)
    return {
        "table_mb": round(table),
        "indexes_mb": round(indexes),
        "ready_mb": round(float(ready), 1),
        "dead_rows": dead,
        "live_rows": live,
        "vacuums": vacuums,
    }


def processed():
    from django_faktory.store.statistics import counts

    return counts.read(using="default").totals["processed"]


def fetch_times(port, queue, seconds, *, pushes):
    probe = Probe(port, queue, pushes=pushes)
    probe.start()
    time.sleep(seconds)
    probe.stop()
    return probe.taken()


def drain(count):
    """Return jobs per second and kB of WAL per job, for the first `count` jobs that workers finish.

    The time starts with the first job. The jobs need a `keep_s`, because their times are read from their rows.
    """
    ask("DELETE FROM django_faktory_history WHERE state = 'succeeded'")  # jobs that earlier FETCHes took
    target, wal = processed() + count, ask("SELECT pg_current_wal_insert_lsn()")[0]
    with workers("--queues", "default"):
        while processed() < target:
            time.sleep(0.02)
        written = ask("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s)", [wal])[0]
    first, last = ask(
        "SELECT MIN(started_at), MAX(finished_at) FROM (SELECT started_at, finished_at FROM django_faktory_history"
        " WHERE state = 'succeeded' AND queue = 'default' ORDER BY finished_at LIMIT %s) AS done",
        [count],
    )
    return round(count / (last - first).total_seconds()), round(float(written) / count / 1024, 1)


def backlog(size, *, rounds, jobs, **_):
    """Compare an empty queue, a backlog in another queue and a backlog in the same queue; they alternate."""
    found = {
        name: {"jobs_per_s": [], "wal_kb_per_job": [], "fetch": []}
        for name in ("empty queue", "other queue", "same queue")
    }
    for turn in range(rounds):
        for name, readings in found.items():
            empty()
            insert(0 if name == "empty queue" else size, "default" if name == "same queue" else "other", keep_s=600)
            ask("VACUUM ANALYZE django_faktory_job")
            with node("--server-only") as (_, port):
                # In the same queue, FETCH takes jobs of the backlog; otherwise, jobs that were just pushed.
                readings["fetch"].append(fetch_times(port, "default", FETCHES_S, pushes=name != "same queue"))
            insert(jobs, keep_s=600)
            rate, wal = drain(jobs)
            readings["jobs_per_s"].append(rate)
            readings["wal_kb_per_job"].append(wal)
            print(f"round {turn + 1}, {name}:", {what: values[-1] for what, values in readings.items()}, flush=True)
    return found


def done(size, *, step, keep_s, **_):
    """Return the rate of the same workers after each step, and the table's size."""
    empty()
    found, before = [], processed()
    with workers("--queues", "default"):
        while before < size:
            count = min(step, size - before)
            insert(count, keep_s=keep_s)
            began = time.perf_counter()
            while (now := processed()) < before + count:
                time.sleep(0.05)
            found.append({"done": now, "jobs_per_s": round((now - before) / (time.perf_counter() - began))} | sizes())
            print(found[-1], flush=True)
            before = now
    return {"readings": found, "slope_percent_per_million": slope(found)}


def slope(readings):
    """Return by how many percent of the mean the rate changes per million jobs, by least squares.

    The first step is left out, because processes start during it.
    """
    points = [(one["done"] / 1e6, one["jobs_per_s"]) for one in readings[1:]]
    if len(points) < 2:
        return None
    x_mean = sum(x for x, _ in points) / len(points)
    y_mean = sum(y for _, y in points) / len(points)
    rise = sum((x - x_mean) * (y - y_mean) for x, y in points) / sum((x - x_mean) ** 2 for x, _ in points)
    return round(rise / y_mean * 100, 2)


@contextmanager
def open_snapshot(*, writes=False):
    """Keep a transaction of another session open after it has read the database, and with `writes` written too.

    PostgreSQL cannot clean up any row that this transaction might see.
    """
    import psycopg
    from django.db import connection

    with psycopg.connect(**connection.get_connection_params()) as other:
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT COUNT(*) FROM django_faktory_queue")
        if writes:
            other.execute("SELECT pg_current_xact_id()")
        yield


def snapshot(seconds, *, step, **_):
    """Measure before, during and after an open snapshot.

    Each reading has the workers' rate, and a lone FETCH from the same queue and from another.
    """
    empty()
    with node("--server-only") as (_, port), workers("--queues", "default"):
        probes = {"same": Probe(port, "default", pushes=False), "other": Probe(port, "probe", pushes=True)}
        readings = Readings(probes, step)
        for probe in probes.values():
            probe.start()
        found = readings.take("before", 5 * READING_S)
        with open_snapshot():
            found += readings.take("open", seconds)
        found += readings.take("after", max(seconds / 2, 5 * READING_S))
        for probe in probes.values():
            probe.stop()
    return found


class Readings:
    """Takes a reading every few seconds, and inserts jobs so that the workers always have some."""

    def __init__(self, probes, step):
        self.probes, self.step, self.pushed = probes, step, 0
        self._feed()

    def take(self, phase, seconds):
        found, began = [], time.perf_counter()
        while (age_s := time.perf_counter() - began) < seconds:
            self._feed()
            before, since = processed(), time.perf_counter()
            for probe in self.probes.values():
                probe.taken()
            time.sleep(READING_S)
            rate = (processed() - before) / (time.perf_counter() - since)
            reading = {"phase": phase, "age_s": round(age_s + READING_S), "jobs_per_s": round(rate)}
            reading |= {f"fetch_{name}": probe.taken() for name, probe in self.probes.items()} | sizes()
            found.append(reading)
            print(reading, flush=True)
        return found

    def _feed(self):
        # Not counted in the table: with an open snapshot, that would be the most expensive statement.
        if self.pushed - processed() < self.step / 2:
            insert(self.step)
            self.pushed += self.step


def purge(size, **_):
    """Measure FETCH alone, then while finished jobs that have reached their `purge_at` are deleted."""
    empty()
    found = {}
    with node("--server-only") as (_, port):
        found["nothing else"] = fetch_times(port, "probe", FETCHES_S, pushes=True)
    insert(size, "old", state="dead", purge_in_s=-1)
    with node("--server-only") as (_, port):  # a node purges when it starts, then once a minute
        probe = Probe(port, "probe", pushes=True)
        probe.start()
        began = time.perf_counter()
        while ask("SELECT EXISTS (SELECT 1 FROM django_faktory_job WHERE state = 'dead')")[0]:
            time.sleep(0.2)
        took_s = time.perf_counter() - began
        probe.stop()
        found["purging"] = probe.taken() | {"seconds": round(took_s, 1), "rows_per_s": round(size / took_s)}
    print(found, flush=True)
    return found


def table(found):
    """Return the results as a Markdown table."""
    lines = ["| what | |", "|---|---|"]
    rates = {name: median(one["jobs_per_s"]) for name, one in found.get("backlog", {}).items()}
    for name, rate in rates.items():
        p99 = median(one["p99_ms"] for one in found["backlog"][name]["fetch"])
        share = rate / rates["empty queue"]
        lines.append(f"| backlog, {name} | {rate:,.0f} jobs/s ({share:.2f} of an empty queue's), FETCH p99 {p99} ms |")
    if "done" in found:
        first, *_, last = found["done"]["readings"] * 2
        lines.append(
            f"| done: first and last step | {first['jobs_per_s']:,} and {last['jobs_per_s']:,} jobs/s,"
            f" slope {found['done']['slope_percent_per_million']} % a million |"
        )
    for phase in ("before", "open", "after"):
        here = [one for one in found.get("snapshot", []) if one["phase"] == phase]
        if here:
            last = here[-1]
            lines.append(
                f"| snapshot {phase}, after {last['age_s']} s | {last['jobs_per_s']:,} jobs/s,"
                f" FETCH p99 {last['fetch_same']['p99_ms']} ms, in another queue {last['fetch_other']['p99_ms']} ms,"
                f" {last['dead_rows']:,} dead rows |"
            )
    for name, one in found.get("purge", {}).items():
        speed = f", {one['rows_per_s']:,} rows/s" if "rows_per_s" in one else ""
        lines.append(f"| purge: {name} | FETCH p99 {one['p99_ms']} ms{speed} |")
    return "\n".join(lines)


PARTS = {"backlog": backlog, "done": done, "snapshot": snapshot, "purge": purge}


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description="No part named: all of them.")
    for name, unit in {"backlog": "JOBS", "done": "JOBS", "snapshot": "SECONDS", "purge": "JOBS"}.items():
        parser.add_argument(f"--{name}", type=int, nargs="?", const=SIZES[name], metavar=unit)
    parser.add_argument("--rounds", type=int, default=3, help="of --backlog")
    parser.add_argument("--jobs", type=int, default=20_000, help="a drain of --backlog")
    parser.add_argument("--step", type=int, default=500_000, help="jobs between two readings of --done")
    parser.add_argument("--keep-s", type=int, help="with --done: seconds to keep results; default: none are kept")
    parser.add_argument("--json", action="store_true", help="print every reading at the end")
    options = vars(parser.parse_args())
    chosen = {name: options[name] for name in PARTS if options[name] is not None} or SIZES
    prepare()
    about = machine() | {name: ask(f"SHOW {name}")[0] for name in ("autovacuum", "autovacuum_naptime")}
    print(json.dumps(about | {"sizes": chosen}, indent=2), flush=True)
    if about["autovacuum"] != "on":
        print("autovacuum is off: the figures are not those of a maintained database")
    found = {name: PARTS[name](size, **options) for name, size in chosen.items()}
    text = json.dumps({"machine": about, "options": options, "found": found}, indent=2)
    (HERE / "results" / "growth.json").write_text(text + "\n")
    print(text if options["json"] else f"\n{table(found)}")


if __name__ == "__main__":
    main()
