"""Measure FETCH latency while MUTATE and QUEUE REMOVE change a million jobs.

    python -m benchmarks.mutate [JOBS]          (PostgreSQL; 1,000,000 dead jobs by default)

One client pushes, fetches and acknowledges one job at a time over a real server; another sends the long commands.
Creates and empties the database of the other benchmarks.
"""

import json
import sys
import time

from benchmarks.client import Client
from benchmarks.database import machine, prepare
from benchmarks.probe import Probe
from benchmarks.processes import node

WANTED_P99_MS = 20
IDLE_S = 5

INSERT = """
INSERT INTO django_faktory_job (jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for, backtrace,
    run_at, enqueued_at, finished_at, purge_at, failures, attempt, errtype, failure)
SELECT 'dead-' || n, kind, 'backlog', 'dead', 0,
    '{"jid":"dead-' || n || '","jobtype":"' || kind || '","args":[' || n
        || ',"some text"],"queue":"backlog","retry":25}',
    25, 1800, 0, NULL, now() - interval '1 day', now(), now() + interval '180 days', 26, 26, 'KeyError',
    '{"retry_count":26,"remaining":0,"message":"no","errtype":"KeyError","backtrace":[]}'
FROM (SELECT n, CASE n %% 2 WHEN 0 THEN 'report' ELSE 'mail' END AS kind FROM generate_series(1, %s) AS n) AS made
"""


def insert(jobs):
    """Insert dead jobs, and update the statistics as in a database that has run for a while."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(INSERT, [jobs])
        cursor.execute("ANALYZE django_faktory_job")


def counted():
    from django.db.models import Count

    from django_faktory.models import Job

    jobs = Job.objects.filter(queue="backlog").order_by()
    return {f"{jobtype} {state}": n for jobtype, state, n in jobs.values_list("jobtype", "state").annotate(Count("pk"))}


def measure(name, probe, work):
    probe.taken()
    began = time.perf_counter()
    work()
    took_s = time.perf_counter() - began
    found = {"what": name, "seconds": round(took_s, 1)} | probe.taken()
    print(json.dumps(found), flush=True)
    return found


def measured(port, jobs):
    probe, person = Probe(port, "probe", pushes=True), Client(port)
    probe.start()
    time.sleep(1)
    half = jobs // 2
    found = [measure("nothing else", probe, lambda: time.sleep(IDLE_S))]

    def long_work(line, expected):
        found.append(measure(line, probe, lambda: person.ask(line)))
        assert counted() == expected, f"expected {expected}, got {counted()}"

    long_work('MUTATE {"cmd":"requeue","target":"dead"}', {"report enqueued": half, "mail enqueued": jobs - half})
    long_work("QUEUE REMOVE backlog", {})
    insert(jobs)
    long_work('MUTATE {"cmd":"discard","target":"dead","filter":{"jobtype":"report"}}', {"mail dead": jobs - half})
    long_work(
        'MUTATE {"cmd":"kill","target":"dead","filter":{"regexp":"*,\\"some t?xt\\"*"}}', {"mail dead": jobs - half}
    )
    long_work('MUTATE {"cmd":"clear","target":"dead"}', {})
    probe.stop()
    return found


def main():
    jobs = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    prepare()
    print(json.dumps(machine() | {"jobs": jobs}, indent=2), flush=True)
    insert(jobs)
    with node("--server-only") as (_, port):
        found = measured(port, jobs)
    worst = max(one["p99_ms"] for one in found[1:])
    print(f"FETCH during long work, worst p99: {worst:.1f} ms (less than {WANTED_P99_MS} asked)")
    return 0 if worst < WANTED_P99_MS else 1


if __name__ == "__main__":
    sys.exit(main())
