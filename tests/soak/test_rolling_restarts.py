"""Rolling restarts under long jobs: real processes, SIGTERM, a short SHUTDOWN_TIMEOUT. Full size: `make soak`."""

import os
import signal
import time
from itertools import pairwise

import pytest
from django.db import connection

from django_faktory import Batch
from django_faktory.models import Job, JobLock, WorkerProcess
from django_faktory.store.limits import limiters
from tests.project.models import Mark
from tests.project.tasks import noop
from tests.runtime.processes import tasks
from tests.runtime.processes.conftest import runfaktory  # noqa: F401  (a fixture)
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

RESTARTS = int(os.environ.get("FAKTORY_SOAK_RESTARTS", "3"))
JOBS = 200 if RESTARTS >= 5 else 40
NODES = 2
THREADS = JOBS // 8

LONG = [
    # On SQLite a long transaction that writes blocks every other writer.
    task
    for task in tasks.LONG
    if not (connection.vendor == "sqlite" and task is tasks.is_long_and_atomic)
]


def lasts_for(number):
    """Return the number of restarts that this job outlives: it cannot end earlier."""
    return number % (RESTARTS + 1)


def runs_of(path):
    """Return the begin and end of each run of a job, in the order of their begins."""
    return sorted(tuple(map(float, line.split()[:2])) for line in path.read_text().splitlines())


def start(runfaktory):  # noqa: F811
    arguments = ("--worker-only", "--processes", "1", "--concurrency", str(THREADS), "--queues", "default")
    return runfaktory(*arguments, SHUTDOWN_TIMEOUT=0.2, POLL_INTERVAL=0.5)


def are_running(jids):
    return Job.objects.filter(state="working", jid__in=jids).count() >= 2 * NODES


def report(interruptions, restarted_s, ended_s):
    print(  # noqa: T201  (shown with -s, and where it failed)
        f"{JOBS} jobs, {RESTARTS} rolling restarts of {NODES} nodes in {restarted_s:.1f} s, "
        f"{sum(interruptions)} interruptions of {sum(map(bool, interruptions))} jobs, all ended after {ended_s:.1f} s"
    )


def test_rolling_restarts_count_no_attempt_and_cause_no_overlapping_runs(runfaktory, tmp_path):  # noqa: F811
    restarts = tmp_path / "restarts"
    restarts.touch()
    results = {}
    with Batch(description="all", success=noop) as batch:
        for number in range(JOBS):
            name, task = f"{number:03d}", LONG[number % len(LONG)]
            results[name] = task, task.enqueue(str(tmp_path), name, lasts_for(number)).id
    begun_at = time.monotonic()
    nodes = [start(runfaktory) for _ in range(NODES)]
    gone = []
    for restart in range(RESTARTS):
        long = [jid for name, (_, jid) in results.items() if lasts_for(int(name)) > restart]
        wait_until(lambda long=long: are_running(long), 60, what="jobs that outlive this restart")
        before, nodes = nodes, [start(runfaktory) for _ in range(NODES)]
        for node in nodes:
            node.wait_for_log("worker started")
        for node in before:
            node.signal(signal.SIGTERM)
        assert [node.code() for node in before] == [0] * NODES
        gone += before
        restarts.write_bytes(b"." * (restart + 1))
    restarted_s = time.monotonic() - begun_at
    callback = Job.objects.filter(callback_of=batch.bid)
    wait_until(lambda: callback.filter(state="succeeded").exists(), 200, what="the end of all jobs")
    for node in nodes:
        node.signal(signal.SIGTERM)
    assert [node.code() for node in nodes] == [0] * NODES

    interruptions = dict(Job.objects.values_list("jid", "interruptions"))
    for name, (task, jid) in results.items():
        found = task.get_result(jid)
        assert (found.status, found.attempts, found.errors) == ("SUCCESSFUL", 1, []), name
        assert (tmp_path / f"{name}.steps").stat().st_size == lasts_for(int(name)), name
        runs = runs_of(tmp_path / f"{name}.runs")
        assert 1 <= len(runs) <= interruptions[jid] + 1, name
        assert [(one, two) for one, two in pairwise(runs) if one[1] > two[0]] == [], name
    assert Job.objects.exclude(losses=0, failures=0, errtype="").count() == 0
    assert callback.count() == 1
    atomic = [name for name, (task, _) in results.items() if task is tasks.is_long_and_atomic]
    assert sorted(Mark.objects.values_list("text", flat=True)) == atomic
    assert not JobLock.objects.exists()
    assert not limiters.sweep(using="default")
    assert not WorkerProcess.objects.exists()
    assert [line for node in [*gone, *nodes] for line in node.lines if "ERROR" in line or "Traceback" in line] == []
    assert sum(interruptions.values()) >= RESTARTS
    report(interruptions.values(), restarted_s, time.monotonic() - begun_at)
