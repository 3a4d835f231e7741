"""The first figures: drain by own workers, the server over ten connections, pick-up of a lone job.

    python -m benchmarks.first_speed            (PostgreSQL as it is configured; BENCH_DATABASE=sqlite for SQLite)

Prints the machine and the settings first: a figure without them is worth nothing. It makes and empties the
database BENCH_NAME, `faktory_bench` unless told otherwise.
"""

import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import django

ROUNDS = 3
JOBS = int(os.environ.get("BENCH_JOBS", "20000"))
HERE = Path(__file__).parent


def prepare():
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
    (HERE / "results").mkdir(exist_ok=True)
    if os.environ.get("BENCH_DATABASE", "postgresql") == "postgresql":
        import psycopg

        from benchmarks.settings import DATABASES

        at = DATABASES["default"]
        with psycopg.connect(
            host=at["HOST"],
            port=at["PORT"],
            user=at["USER"],
            password=at["PASSWORD"],
            dbname="postgres",
            autocommit=True,
        ) as connection:
            # Anew each time: its tables may be those of an older version.
            connection.execute(f'DROP DATABASE IF EXISTS "{at["NAME"]}" WITH (FORCE)')
            connection.execute(f'CREATE DATABASE "{at["NAME"]}"')
    else:
        from benchmarks.settings import DATABASES

        for file in (HERE / "results").glob(f"{Path(DATABASES['default']['NAME']).name}*"):
            file.unlink()
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def machine():
    from django.db import connection

    model = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")][:1]
    found = {
        "cpus": os.cpu_count(),
        "cpu": model[0] if model else platform.processor(),
        "python": platform.python_version(),
        "django": django.get_version(),
    }
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            for name in ("server_version", "fsync", "synchronous_commit", "full_page_writes", "shared_buffers"):
                cursor.execute(f"SHOW {name}")
                found[name] = cursor.fetchone()[0]
        else:
            for name in ("journal_mode", "synchronous"):
                cursor.execute(f"PRAGMA {name}")
                found[name] = cursor.fetchone()[0]
    return found


def empty():
    from django.db import connection

    from django_faktory.models import Counter, Job, Queue, WorkerProcess

    for model in (Job, Counter, Queue, WorkerProcess):
        model.objects.all().delete()
    with connection.cursor() as cursor:
        cursor.execute("VACUUM" if connection.vendor != "postgresql" else "VACUUM ANALYZE")


def faktory(*options):
    return subprocess.Popen([sys.executable, "-m", "django", "runfaktory", *options], start_new_session=True)


def end(process):
    process.send_signal(signal.SIGTERM)
    process.wait(40)


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
    return JOBS / (times["last"] - times["first"]).total_seconds()


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
    return {"p50": statistics.median(waits), "p95": waits[94], "p99": waits[98]}


def main():
    prepare()
    print(json.dumps(machine(), indent=2))
    figures = {"drain": [], "server_10": [], "server_50": [], "pick_up_ms": []}
    for _ in range(ROUNDS):
        figures["drain"].append(round(drain()))
        figures["server_10"].append(serve(10))
        figures["server_50"].append(serve(50))
        figures["pick_up_ms"].append({name: round(value, 2) for name, value in pick_up().items()})
        print(json.dumps({name: values[-1] for name, values in figures.items()}))
    print(f"own workers, no-op tasks:          {statistics.median(figures['drain']):.0f} jobs/s (at least 2000 asked)")
    print(
        f"server, 10 connections:            {statistics.median(figures['server_10']):.0f} jobs/s (at least 1500 asked)"
    )
    print(f"server, 50 connections:            {statistics.median(figures['server_50']):.0f} jobs/s")
    p50 = statistics.median(one["p50"] for one in figures["pick_up_ms"])
    print(f"pick-up of a lone job, median:     {p50:.1f} ms (at most 10 asked)")


if __name__ == "__main__":
    main()
