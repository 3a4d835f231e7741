"""Measure the basic figures: drain by own workers, the server with 10 and 50 connections, pick-up of a lone job.

    python -m benchmarks.first_speed            (all of it, on PostgreSQL as it is configured)
    python -m benchmarks.first_speed drain      (that only: enqueue_many, drain, drain_logged, server_10, server_50,
                                                 pick_up_ms)

BENCH_DATABASE=sqlite or mariadb selects another database. BENCH_SYNCHRONOUS=FULL makes SQLite write each commit to
disk.

Prints the machine and the settings first, because a figure is meaningless without them. Creates and empties the
database BENCH_NAME, by default `faktory_bench`.
"""

import json
import os
import statistics
import subprocess
import sys
import time

from benchmarks.database import HERE, empty, machine, prepare
from benchmarks.processes import node, workers

ROUNDS = 3
JOBS = int(os.environ.get("BENCH_JOBS", "20000"))


def enqueue_many():
    from benchmarks.tasks import noop

    empty()
    calls = [(number, "x") for number in range(10_000)]
    begun = time.perf_counter()
    noop.enqueue_many(calls)
    return round(10_000 / (time.perf_counter() - begun))


def drain(name="noop"):
    from django.db.models import Max, Min

    from benchmarks import tasks
    from django_faktory.models import Job

    empty()
    getattr(tasks, name).enqueue_many([(number, "x") for number in range(JOBS)])
    with workers("--drain") as process:
        process.wait(300)
    done = Job.objects.filter(state="succeeded")
    times = done.aggregate(first=Min("started_at"), last=Max("finished_at"))
    assert done.count() == JOBS, f"expected {JOBS} jobs done, got {done.count()}"
    return round(JOBS / (times["last"] - times["first"]).total_seconds())


def serve(connections):
    empty()
    with node("--server-only") as (_, port):
        load = [sys.executable, str(HERE / "fwp_load.py"), f"127.0.0.1:{port}", str(JOBS // 2), str(connections)]
        return json.loads(subprocess.run(load, capture_output=True, check=True, timeout=300).stdout)["jobs_per_s"]


def pick_up():
    from benchmarks.tasks import now
    from django_faktory.models import Job

    empty()
    with workers():
        now.enqueue()
        while not Job.objects.filter(state="succeeded").exists():
            time.sleep(0.05)
        called = {}
        for _ in range(100):
            time.sleep(0.05)
            before = time.time()
            called[now.enqueue().id] = before
        while Job.objects.exclude(state="succeeded").exists():
            time.sleep(0.05)
    rows = dict(Job.objects.filter(jid__in=called).values_list("jid", "result"))
    waits = sorted((float(rows[jid]) - before) * 1000 for jid, before in called.items())
    return {"p50": round(statistics.median(waits), 2), "p95": round(waits[94], 2), "p99": round(waits[98], 2)}


MEASURES = {
    "enqueue_many": ("enqueue_many of 10,000:", "{:,.0f} jobs/s", enqueue_many),
    "drain": ("own workers, no-op tasks:", "{:,.0f} jobs/s", drain),
    "drain_logged": ("own workers, tasks with a log line:", "{:,.0f} jobs/s", lambda: drain("logged")),
    "server_10": ("server, 10 connections:", "{:,.0f} jobs/s", lambda: serve(10)),
    "server_50": ("server, 50 connections:", "{:,.0f} jobs/s", lambda: serve(50)),
    "pick_up_ms": ("pick-up of a lone job:", "p50 {p50:.2f} ms, p95 {p95:.2f} ms, p99 {p99:.2f} ms", pick_up),
}


def main():
    chosen = sys.argv[1:] or list(MEASURES)
    prepare()
    print(json.dumps(machine(), indent=2))
    figures = {name: [] for name in chosen}
    for _ in range(ROUNDS):
        for name in chosen:
            figures[name].append(MEASURES[name][2]())
        print(json.dumps({name: values[-1] for name, values in figures.items()}), flush=True)
    for name, values in figures.items():
        label, template, _ = MEASURES[name]
        if isinstance(values[0], dict):
            middle = {key: statistics.median(one[key] for one in values) for key in values[0]}
            print(f"{label:<30} {template.format(**middle)}")
        else:
            print(f"{label:<30} {template.format(statistics.median(values))}")


if __name__ == "__main__":
    main()
