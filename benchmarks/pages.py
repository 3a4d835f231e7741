"""Time pages of the admin and lists of the API with millions of jobs: `python -m benchmarks.pages [N]`.

There are 1,000 queues and 100 tasks, with timings of 30 days. Each page is requested without shared results. Then it
measures the cost of 500 open pages that update themselves. PostgreSQL only: its generate_series makes the rows.

Exits with 1 if a median is 300 ms or more. With --keep it times the data of the latest run again.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

LIMIT_MS = 300
TIMES = 5
WATCHERS = 500
WATCHED_TIMES = 40
NEEDED = {"BENCH_NAME": "faktory_bench_pages", "DJANGO_SETTINGS_MODULE": "benchmarks.page_settings"}

STATES = """
CASE WHEN n % 1000 < 40 THEN 'enqueued' WHEN n % 1000 < 80 THEN 'scheduled' WHEN n % 1000 < 100 THEN 'retries'
     WHEN n % 1000 < 140 THEN 'dead' WHEN n % 1000 < 143 THEN 'discarded' WHEN n % 1000 < 145 THEN 'expired'
     WHEN n % 1000 = 145 AND n <= 1000000 THEN 'working' WHEN n % 1000 = 146 THEN 'blocked' ELSE 'succeeded' END"""
"""States per thousand jobs: most have succeeded and are kept for their results. At most 1,000 are running."""
TRACEBACK = json.dumps(
    [
        line
        for depth in range(12)
        for line in (
            f'  File "/srv/venv/lib/python3.13/site-packages/requests/layer_{depth}.py", line {depth}, in send',
            "    return super().send(request, **options)",
        )
    ]
    + ['  File "/srv/shop/tasks.py", line 12, in call', "    answer = session.post(url)"]
)
TASK, QUEUE = "n / 11 % 100", "CASE WHEN n % 2 = 0 THEN n / 1000 % 20 ELSE n / 7 % 1000 END"
"""Half of the jobs are in the first 20 of 1,000 queues. Neither follows the order of states."""

JOB_ROWS = f"""
INSERT INTO django_faktory_job (jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for, backtrace,
  result_ttl, created_at, run_at, enqueued_at, started_at, reserved_until, finished_at, purge_at, wid, attempt,
  failures, errtype, failure, history, result, lock_key, bid, has_run, about)
SELECT 'job-' || n, 'shop.tasks.task_' || task, 'queue-' || queue, state, 0,
  '{{"jid":"job-' || n || '","jobtype":"shop.tasks.task_' || task || '","args":[' || n
    || ',{{"address":"https://example.org/hook","retries":3}}],"queue":"queue-' || queue || '","retry":25}}',
  25, 1800, 0, CASE WHEN state = 'succeeded' THEN 86400 END,
  born, CASE WHEN state IN ('scheduled', 'retries') THEN now() + n % 100000 * interval '1 s' END,
  CASE WHEN state NOT IN ('scheduled', 'retries') THEN born END,
  CASE WHEN state IN ('working', 'dead', 'succeeded') THEN born + interval '1 s' END,
  CASE WHEN state = 'working' THEN now() + interval '1 h' END,
  CASE WHEN has_ended THEN born + interval '3 s' END, CASE WHEN has_ended THEN now() + interval '1 d' END,
  CASE WHEN state IN ('working', 'dead', 'succeeded') THEN 'wid-' || (n % 200) ELSE '' END,
  CASE WHEN state IN ('working', 'dead', 'succeeded') THEN 1 ELSE 0 END,
  CASE WHEN state IN ('retries', 'dead') THEN 1 ELSE 0 END,
  CASE WHEN state IN ('retries', 'dead') THEN 'requests.exceptions.Error' || (n / 1000 % 12) ELSE '' END,
  CASE WHEN state IN ('retries', 'dead') THEN '{{"message":"order ' || n
    || ': no answer in 30 s","backtrace":{TRACEBACK}}}' ELSE '' END,
  CASE WHEN state IN ('retries', 'dead') THEN '[{{"attempt":1,"wid":"w","errtype":"E","message":"order ' || n
    || ': no answer","backtrace":{TRACEBACK}}}]' ELSE '' END,
  CASE WHEN state = 'succeeded' THEN '{{"sent":true}}' END,
  CASE WHEN state IN ('blocked', 'working') THEN 'order-' || (n / 1000 % 1000) END,
  CASE WHEN n % 10 = 1 THEN CASE WHEN n % 20 = 1 THEN 'b-large' ELSE 'b-' || (n / 1000) END END,
  has_ended, CASE WHEN n % 3 = 0 THEN 'shop.order/' || (n % 5000) END
FROM (SELECT n, {STATES} AS state, {TASK} AS task, {QUEUE} AS queue,
        now() - (%s - n) % 2592000 * interval '1 s' AS born
      FROM generate_series(%s, %s) AS n) AS job,
  LATERAL (SELECT state IN ('dead', 'succeeded', 'discarded', 'expired') AS has_ended) AS ended"""
ENDED = "state IN ('succeeded', 'discarded', 'expired')"
HISTORY_ROWS = JOB_ROWS.replace("django_faktory_job (", "django_faktory_history (id, day, ").replace(
    "SELECT 'job-'", "SELECT nextval(pg_get_serial_sequence('django_faktory_job', 'id')), '1970-01-01', 'job-'", 1
)
CHUNK = 250_000

OTHERS = """
INSERT INTO django_faktory_queue (name, paused_at)
  SELECT 'queue-' || n, CASE WHEN n = 7 THEN now() END FROM generate_series(0, 999) AS n;
INSERT INTO django_faktory_workerprocess (wid, hostname, pid, labels, state, rss_kb, started_at, seen_at, beat_at)
  SELECT 'wid-' || n, 'app-' || (n / 8), n, '["python"]', 'running', 90000, now(), now(), now()
  FROM generate_series(0, 199) AS n;
INSERT INTO django_faktory_batch (bid, parent_bid, depth, description, complete, success, total, pending, unrun,
    failed, children, open_children, unsucceeded_children, created_at, committed_at, finished_at)
  SELECT 'b-' || n, CASE WHEN n % 10 = 0 THEN '' ELSE 'b-' || n / 10 * 10 END, CASE WHEN n % 10 = 0 THEN 0 ELSE 1 END,
    'delivery ' || n, '', '{"jid":"callback","jobtype":"shop.done","args":[]}', 50, 3, 2, 1,
    CASE WHEN n % 10 = 0 THEN 9 ELSE 0 END, CASE WHEN n % 10 = 0 THEN 1 ELSE 0 END, CASE WHEN n % 10 = 0 THEN 1 ELSE 0
    END, now(), now(), CASE WHEN n % 4 = 0 THEN now() END
  FROM generate_series(0, {jobs} / 1000) AS n;
INSERT INTO django_faktory_batch (bid, description, complete, success, total, pending, unrun, committed_at, depth)
  VALUES ('b-large', 'all orders', '', '', {jobs} / 20, {jobs} / 200, {jobs} / 200, now(), 0);
INSERT INTO django_faktory_cronentry (name, origin, schedule, zone, jobtype, queue, args, kwargs, job, missed, window_s,
    overlap, next_at)
  SELECT 'report ' || n, 'admin', '0 3 * * *', 'Europe/Berlin', 'shop.tasks.task_1', '', '[]', '{}', '{}', 'once',
    86400, 'allow', now() + interval '1 h' FROM generate_series(1, 100) AS n;
INSERT INTO django_faktory_cronrun (entry_id, tick, at, jid, outcome)
  SELECT id, now() - n * interval '1 d', now(), 'job-' || (n * 1000 + 500), 'enqueued'
  FROM django_faktory_cronentry, generate_series(1, 100) AS n;
INSERT INTO django_faktory_joblock (lock_key, jid, attempt, wid, lease, acquired_at, expires_at, is_lapsed)
  SELECT 'order-' || n, 'job-' || (n * 1000 + 145), 1, 'wid-' || (n % 200), interval '35 s', now(),
    now() + interval '1 h', false FROM generate_series(0, 999) AS n;
INSERT INTO django_faktory_outboxentry (jid, queue, job, created_at, error)
  SELECT 'out-' || n, 'queue-1', '{}', now(), CASE WHEN n % 3 = 0 THEN 'refused' ELSE '' END
  FROM generate_series(1, {jobs} / 50) AS n;
INSERT INTO django_faktory_limit (scope, name, origin, concurrency, per)
  SELECT 'task', 'shop.tasks.task_' || n, 'admin', 5, 1 FROM generate_series(0, 99) AS n;
INSERT INTO django_faktory_delta (mark, kind, name, amount)
  SELECT '1', kind, (current_date - d)::text, amount
  FROM generate_series(0, 700) AS d,
    (VALUES ('processed', 160000), ('failed', 1600), ('late', 16)) AS totals (kind, amount)"""

SERIES = """
INSERT INTO django_faktory_measure (minute, queue, jobtype, used_at, {sums})
SELECT minute, 'queue-' || CASE WHEN part = 0 THEN task % 20 ELSE (task * 7 + part) % 1000 END,
  'shop.tasks.task_' || task, now(), {values}
FROM ({minutes}) AS times, generate_series(0, 99) AS task, generate_series(0, 2) AS part"""
MINUTES = """
SELECT date_trunc('hour', now()) - n * interval '1 h' AS minute FROM generate_series(4, 30 * 24) AS n
UNION ALL SELECT date_trunc('minute', now()) - n * interval '1 min' FROM generate_series(0, 200) AS n
UNION ALL SELECT to_timestamp(0)"""
"""Times of the sums: each hour of 30 days, each minute since, and all time. Each task has jobs in three queues."""


def fill(jobs):
    """Insert `jobs` jobs and all rows that belong to them."""
    from django.contrib.auth.models import User
    from django.db import connection

    from django_faktory.core.histograms import BUCKETS

    with connection.cursor() as cursor:
        for first in range(1, jobs + 1, CHUNK):
            for rows in (f"{JOB_ROWS} WHERE NOT {ENDED}", f"{HISTORY_ROWS} WHERE {ENDED}"):
                text = rows.replace("%", "%%").replace("%%s", "%s")
                cursor.execute(text, [jobs, first, min(first + CHUNK - 1, jobs)])
            print(f"-- {min(first + CHUNK - 1, jobs):,} jobs", file=sys.stderr)
        for statement in OTHERS.replace("{jobs}", str(jobs)).split(";\n"):
            cursor.execute(statement)
        sums = {"started": 52, "succeeded": 50, "failed": 2, "waited_s": 9.5, "ran_s": 30.5}
        sums |= {f"{kind}_{place}": 9 - abs(4 - place) for kind in ("wait", "run") for place in range(BUCKETS)}
        cursor.execute(SERIES.format(sums=", ".join(sums), values=", ".join(map(str, sums.values())), minutes=MINUTES))
        cursor.execute("VACUUM ANALYZE")
    User.objects.create_superuser("on-call")


def pages():
    """Return {name: address}: each page and list, and searches that users make."""
    return _admin_pages() | _timings() | _lists_of_jobs() | _api()


def of(model, row):
    """Return the address of a row's admin page."""
    from django.urls import reverse

    return reverse(f"admin:django_faktory_{model}_change", args=[row.pk])


JOBS, PART = "/admin/django_faktory/job/", "/admin/django_faktory/"
LIST_EVERY_S = 5
"""The default of admin.js."""


def _admin_pages():
    from django_faktory.models import Batch, CronEntry, Job, JobLock, Limit, OutboxEntry
    from django_faktory.operations.error_groups import read_kind

    dead = Job.objects.dead().latest("pk")
    kind = read_kind(dead).query
    jobs, part = JOBS, PART
    return {
        "metrics": "/metrics/",
        "index": "/admin/",
        "app": part,
        "overview": f"{part}overview/",
        "overview, its part": f"{part}overview/part/",
        "jobs": jobs,
        "jobs, page 20": f"{jobs}?p=20",
        "errors": f"{jobs}errors/",
        "an error": f"{jobs}errors/one/?{kind}",
        "all of an error": f"{jobs}all/?verb=retry&{kind}",
        "all dead": f"{jobs}all/?verb=retry&state=dead",
        "all of a task": f"{jobs}all/?verb=discard&q=task:shop.tasks.task_3",
        "a dead job": of("job", dead),
        "edit it": f"{jobs}{dead.pk}/edit/",
        "a running job": of("job", Job.objects.working().latest("pk")),
        "a running job, its part": f"{jobs}{Job.objects.working().latest('pk').pk}/part/",
        "a blocked job": of("job", Job.objects.in_state("blocked").latest("pk")),
        "queues": f"{part}queue/",
        "workers": f"{part}workerprocess/",
        "a worker": f"{part}workerprocess/wid-145/change/",
        "batches": f"{part}batch/",
        "batches that run": f"{part}batch/?stage=running",
        "batches that fail": f"{part}batch/?stage=failing",
        "root batches": f"{part}batch/?place=root",
        "batch by name": f"{part}batch/?q=delivery+12",
        "a batch": of("batch", Batch.objects.get(bid="b-10")),
        "a large batch": of("batch", Batch.objects.get(bid="b-large")),
        "cron": f"{part}cronentry/",
        "a cron entry": of("cronentry", CronEntry.objects.first()),
        "locks": f"{part}joblock/",
        "lock by key": f"{part}joblock/?q=order-77",
        "a lock": of("joblock", JobLock.objects.first()),
        "outbox": f"{part}outboxentry/",
        "an outbox entry": of("outboxentry", OutboxEntry.objects.first()),
        "limits": f"{part}limit/",
        "a limit": of("limit", Limit.objects.first()),
        "a new limit": f"{part}limit/add/",
        "a new cron entry": f"{part}cronentry/add/",
    }


def _timings():
    pages_of = {
        "tasks": "overview/tasks/?",
        "a task": "overview/tasks/one/?task=shop.tasks.task_3&",
        "a queue": "queue/queue-3/change/?",
    }
    return {
        f"{name}, {period}": f"{PART}{address}period={period}"
        for name, address in pages_of.items()
        for period in ("1h", "24h", "30d")
    }


def _lists_of_jobs():
    found = {}
    for state in (
        "enqueued",
        "scheduled",
        "working",
        "retries",
        "blocked",
        "dead",
        "succeeded",
        "discarded",
        "expired",
    ):
        found[f"{state} jobs"] = f"{JOBS}?state={state}"
    searches = (
        "job-7777",
        "shop.tasks.task_7",
        "queue:queue-3",
        "error:Error3",
        "dead error:Error3 task:shop.*",
        "about:shop.order/42",
        "batch:b-large",
        "older:2d",
        "dead older:2d",
        "text:example",
        "nothing-like-it",
    )
    return found | {f"jobs: {query}": f"{JOBS}?q={query}" for query in searches}


def _api():
    found = {
        f"api {name}": f"/api/{name}/"
        for name in ("jobs", "queues", "workers", "batches", "cron", "locks", "limits", "statistics")
    }
    asked = (
        "state=dead",
        "state=scheduled",
        "state=retries",
        "state=succeeded&queue=queue-3",
        "query=error:Error3",
        "about=shop.order/42",
        "batch=b-large",
        "task=shop.tasks.task_7",
        "query=text:example",
    )
    found |= {f"api jobs {words}": f"/api/jobs/?{words}" for words in asked}
    found |= {f"api batch {more}": f"/api/batches/b-large/{more}" for more in ("", "members/", "children/", "tree/")}
    return found | {
        "api job": "/api/jobs/job-7777/",
        "api queue": "/api/queues/queue-3/",
        "api cron entry": "/api/cron/report 1/",
    }


def measure(client, address):
    """Return the milliseconds of `TIMES` requests, and the CPU milliseconds of one, after one that is not counted."""
    from django_faktory.store import shared_reads

    found = []
    for place in range(TIMES + 1):
        if place == 1:
            cpu_s = sum(read_cpu_s())
        shared_reads.forget()
        began = time.perf_counter()
        answer = client.get(address)
        found.append((time.perf_counter() - began) * 1000)
        assert answer.status_code == 200, (address, answer.status_code)
    return found[1:], (sum(read_cpu_s()) - cpu_s) / TIMES * 1000


def find_slowest_statement(client, address):
    """Return the milliseconds and the beginning of the statement of a page that takes the most time."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    from django_faktory.store import shared_reads

    shared_reads.forget()
    with CaptureQueriesContext(connection) as captured:
        client.get(address)
    slowest = max(captured.captured_queries, key=lambda query: float(query["time"]))
    return float(slowest["time"]) * 1000, slowest["sql"][:600]


def measure_watchers(client):
    """Return {page: (seconds between two polls, CPU seconds of a poll in this process, and in PostgreSQL)}.

    Polls share results as in a server.
    """
    from django_faktory.admin.jobs.detail_views import REFRESHED_EVERY_S as JOB_EVERY_S
    from django_faktory.admin.overview.view import REFRESHED_EVERY_S as OVERVIEW_EVERY_S
    from django_faktory.models import Job

    running = Job.objects.working().latest("pk")
    watched = {
        "the overview": (f"{PART}overview/part/", OVERVIEW_EVERY_S),
        "a running job": (f"{JOBS}{running.pk}/part/", JOB_EVERY_S),
        "a list of jobs": (f"{JOBS}?state=dead", LIST_EVERY_S),
        "a task": (f"{PART}overview/tasks/one/?task=shop.tasks.task_3&period=1h", LIST_EVERY_S),
    }
    found = {}
    for name, (address, every_s) in watched.items():
        client.get(address)
        began = read_cpu_s()
        for _ in range(WATCHED_TIMES):
            assert client.get(address).status_code == 200, address
        used = (after - before for after, before in zip(read_cpu_s(), began, strict=True))
        found[name] = every_s, *(cpu_s / WATCHED_TIMES for cpu_s in used)
    return found


def print_watchers(client):
    from django_faktory.admin.polling import SHARE

    print(f"\n| {WATCHERS} open pages of | CPU ms of a poll | of PostgreSQL | updated every s | share of a core |")
    print("|---|---|---|---|---|")
    for name, (usual_s, cpu_s, database_s) in measure_watchers(client).items():
        every_s = max(usual_s, WATCHERS * cpu_s / SHARE)
        share, share_of_database = (WATCHERS / every_s * used_s for used_s in (cpu_s, database_s))
        print(
            f"| {name} | {cpu_s * 1000:.1f} | {database_s * 1000:.1f} | {every_s:.0f} | {share:.0%} and "
            f"{share_of_database:.0%} |"
        )


def read_cpu_s():
    """Return the CPU seconds of this process, and of PostgreSQL's process for its connection, on the same machine."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        fields = Path(f"/proc/{cursor.fetchone()[0]}/stat").read_text().rpartition(")")[2].split()
    return time.process_time(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main():
    parser = argparse.ArgumentParser(description="Time each page with this number of jobs.")
    parser.add_argument("jobs", nargs="?", type=int, default=5_000_000)
    parser.add_argument("--keep", action="store_true", help="time the data of the latest run")
    options = parser.parse_args()
    for name, value in NEEDED.items():
        os.environ.setdefault(name, value)
    from benchmarks import database

    if options.keep:
        import django

        django.setup()
    else:
        database.prepare()
        fill(options.jobs)
    from django.contrib.auth.models import User
    from django.test import Client

    client = Client()
    client.force_login(User.objects.get(username="on-call"))
    for name, value in database.machine().items():
        print(f"{name}: {value}")
    addresses = pages()
    figures = {name: measure(client, address) for name, address in addresses.items()}
    print(f"\n| page, {options.jobs:,} jobs | median ms | max ms | CPU ms |\n|---|---|---|---|")
    for name, (times, cpu_ms) in figures.items():
        print(f"| {name} | {statistics.median(times):.0f} | {max(times):.0f} | {cpu_ms:.0f} |")
    slow = [name for name, (times, _) in figures.items() if statistics.median(times) >= LIMIT_MS]
    print(f"\n{len(slow)} of {len(figures)} pages take {LIMIT_MS} ms or more{': ' if slow else ''}{', '.join(slow)}")
    for name in slow:
        took_ms, statement = find_slowest_statement(client, addresses[name])
        print(f"\n{name}: {took_ms:.0f} ms of\n{statement}")
    print_watchers(client)
    sys.exit(1 if slow else 0)


if __name__ == "__main__":
    main()
