"""The first figures: drain by own workers, the server over ten connections, pick-up of a lone job.

    python -m benchmarks.first_speed            (all of it, on PostgreSQL as it is configured)
    python -m benchmarks.first_speed drain      (that only: enqueue_many, drain, server_10, server_50, pick_up_ms)

BENCH_DATABASE=sqlite or mariadb for the others; BENCH_SYNCHRONOUS=FULL for SQLite with each commit on disk.

Prints the machine and the settings first: a figure without them is worth nothing. It makes and empties the
database BENCH_NAME, `faktory_bench` unless told otherwise.
"""

import contextlib
import json
import os
import platform
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import time
from pathlib import Path

import django

ROUNDS = 3
JOBS = int(os.environ.get("BENCH_JOBS", "20000"))
KIND = os.environ.get("BENCH_DATABASE", "postgresql")
HERE = Path(__file__).parent


def prepare():
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
    (HERE / "results").mkdir(exist_ok=True)
    from benchmarks.settings import DATABASES

    # Anew each time: its tables may be those of an older version.
    {"postgresql": _new_on_postgresql, "mariadb": _new_on_mariadb, "sqlite": _new_on_sqlite}[KIND](DATABASES["default"])
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def _new_on_postgresql(at):
    import psycopg

    address = {"host": at["HOST"], "port": at["PORT"], "user": at["USER"], "password": at["PASSWORD"]}
    with psycopg.connect(**address, dbname="postgres", autocommit=True) as connection:
        connection.execute(f'DROP DATABASE IF EXISTS "{at["NAME"]}" WITH (FORCE)')
        connection.execute(f'CREATE DATABASE "{at["NAME"]}"')


def _new_on_mariadb(at):
    import MySQLdb

    connection = MySQLdb.connect(host=at["HOST"], port=int(at["PORT"]), user=at["USER"], password=at["PASSWORD"])
    with contextlib.closing(connection), connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE IF EXISTS `{at['NAME']}`")
        cursor.execute(f"CREATE DATABASE `{at['NAME']}` CHARACTER SET utf8mb4")


def _new_on_sqlite(at):
    for file in (HERE / "results").glob(f"{Path(at['NAME']).name}*"):
        file.unlink()


SETTINGS = {
    "postgresql": (
        "SHOW {}",
        ("server_version", "fsync", "synchronous_commit", "full_page_writes", "shared_buffers"),
    ),
    "mysql": ("SELECT @@{}", ("version", "innodb_flush_log_at_trx_commit", "sync_binlog", "innodb_buffer_pool_size")),
    "sqlite": ("PRAGMA {}", ("journal_mode", "synchronous")),
}


def machine():
    from django.db import connection

    model = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")][:1]
    found = {
        "cpus": os.cpu_count(),
        "cpu": model[0] if model else platform.processor(),
        "python": platform.python_version(),
        "django": django.get_version(),
    }
    if connection.vendor == "sqlite":
        found["sqlite"] = sqlite3.sqlite_version
    question, names = SETTINGS[connection.vendor]
    with connection.cursor() as cursor:
        for name in names:
            cursor.execute(question.format(name))
            found[name] = cursor.fetchone()[0]
    return found


def empty():
    from django.db import connection

    from django_faktory.models import Counter, Job, Queue, WorkerProcess

    for model in (Job, Counter, Queue, WorkerProcess):
        model.objects.all().delete()
    tidy = {"postgresql": "VACUUM ANALYZE", "sqlite": "VACUUM"}.get(connection.vendor)
    if tidy:
        with connection.cursor() as cursor:
            cursor.execute(tidy)


def faktory(*options):
    return subprocess.Popen([sys.executable, "-m", "django", "runfaktory", *options], start_new_session=True)


def end(process):
    process.send_signal(signal.SIGTERM)
    process.wait(40)


def enqueue_many():
    from benchmarks.tasks import noop

    empty()
    calls = [(number, "x") for number in range(10_000)]
    begun = time.perf_counter()
    noop.enqueue_many(calls)
    return round(10_000 / (time.perf_counter() - begun))


def drain():
    from django.db.models import Max, Min

    from benchmarks.tasks import noop
    from django_faktory.models import Job

    empty()
    noop.enqueue_many([(number, "x") for number in range(JOBS)])
    worker = faktory("--worker-only", "--drain", "--no-reload")
    worker.wait(300)
    done = Job.objects.filter(state="succeeded")
    times = done.aggregate(first=Min("started_at"), last=Max("finished_at"))
    assert done.count() == JOBS, f"expected {JOBS} jobs done, got {done.count()}"
    return round(JOBS / (times["last"] - times["first"]).total_seconds())


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the server did not start within 30 seconds")


def serve(connections):
    empty()
    port = free_port()
    server = faktory(f"127.0.0.1:{port}", "--server-only", "--no-reload")
    try:
        wait_for(port)
        load = [sys.executable, str(HERE / "fwp_load.py"), f"127.0.0.1:{port}", str(JOBS // 2), str(connections)]
        return json.loads(subprocess.run(load, capture_output=True, check=True, timeout=300).stdout)["jobs_per_s"]
    finally:
        end(server)


def pick_up():
    from benchmarks.tasks import now
    from django_faktory.models import Job

    empty()
    worker = faktory("--worker-only", "--no-reload")
    try:
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
    finally:
        end(worker)
    rows = dict(Job.objects.filter(jid__in=called).values_list("jid", "result"))
    waits = sorted((float(rows[jid]) - before) * 1000 for jid, before in called.items())
    return {"p50": round(statistics.median(waits), 2), "p95": round(waits[94], 2), "p99": round(waits[98], 2)}


MEASURES = {
    "enqueue_many": ("enqueue_many of 10,000:", "{:,.0f} jobs/s", enqueue_many),
    "drain": ("own workers, no-op tasks:", "{:,.0f} jobs/s", drain),
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
        label, told, _ = MEASURES[name]
        if isinstance(values[0], dict):
            middle = {key: statistics.median(one[key] for one in values) for key in values[0]}
            print(f"{label:<30} {told.format(**middle)}")
        else:
            print(f"{label:<30} {told.format(statistics.median(values))}")


if __name__ == "__main__":
    main()
