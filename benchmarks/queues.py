"""Time pages and numbers with many queues: `python -m benchmarks.queues [20000]`.

INFO, /metrics, the overview and the list of queues, each without shared results. A tenth of the queues has a job.
Exits with 1 if a median is 100 ms or more.
"""

import argparse
import os
import statistics
import sys
import time

LIMIT_MS = 100
TIMES = 15
NEEDED = {"BENCH_NAME": "faktory_bench_queues", "DJANGO_SETTINGS_MODULE": "benchmarks.page_settings"}


def fill(queues):
    """Store the queues and the jobs, and refresh the statistics of the planner."""
    from django.db import connection

    from django_faktory.core.payloads import new_job
    from django_faktory.models import Queue
    from django_faktory.store.jobs import pushes
    from django_faktory.store.store import Store

    names = [f"queue-{number:06}" for number in range(queues)]
    Queue.objects.bulk_create([Queue(name=name) for name in names], batch_size=1000)
    for begin in range(0, queues, 10_000):
        jobs = [
            new_job(jid=f"job-{name}", jobtype="noop", args=[], queue=name)
            for name in names[begin : begin + 10_000 : 10]
        ]
        assert pushes.push(Store(), jobs) == [None] * len(jobs)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE TABLE django_faktory_job" if connection.vendor == "mysql" else "ANALYZE")


def requests():
    """Return a function that makes each request, by its name."""
    from django.contrib.auth.models import User
    from django.test import Client, RequestFactory

    from django_faktory.brokers.orm import OrmBroker
    from django_faktory.contrib.metrics.views import metrics

    client = Client()
    client.force_login(User.objects.create_superuser("on-call"))
    broker = OrmBroker("default")
    request = RequestFactory().get("/metrics")
    return {
        "INFO": broker.info,
        "/metrics": lambda: metrics(request),
        "overview": lambda: client.get("/admin/django_faktory/overview/"),
        "list of queues": lambda: client.get("/admin/django_faktory/queue/"),
        "statistics of the API": lambda: client.get("/api/statistics/"),
    }


def measure(send):
    """Return the milliseconds of `TIMES` requests, after two that are not counted."""
    from django_faktory.store import shared_reads

    found = []
    for _ in range(TIMES + 2):
        shared_reads.forget()
        began = time.perf_counter()
        response = send()
        found.append((time.perf_counter() - began) * 1000)
        assert getattr(response, "status_code", 200) == 200, response
    return found[2:]


def main():
    parser = argparse.ArgumentParser(description="Time pages and numbers with many queues.")
    parser.add_argument("queues", nargs="?", type=int, default=20_000)
    options = parser.parse_args()
    for name, value in NEEDED.items():
        os.environ.setdefault(name, value)
    from benchmarks import database

    database.prepare()
    fill(options.queues)
    for name, value in database.machine().items():
        print(f"{name}: {value}")
    figures = {name: measure(send) for name, send in requests().items()}
    print(f"\n| {options.queues:,} queues | median ms | max ms |\n|---|---|---|")
    for name, times in figures.items():
        print(f"| {name} | {statistics.median(times):.0f} | {max(times):.0f} |")
    sys.exit(1 if any(statistics.median(times) >= LIMIT_MS for times in figures.values()) else 0)


if __name__ == "__main__":
    main()
