"""Check that each tick gets exactly one job with five nodes, one killed every second, and an entry due each second.

`make soak` runs it for a minute.
"""

import os
import random
import threading
import time
from datetime import timedelta

import pytest

from django_faktory.models import CronEntry, CronRun, Job
from django_faktory.store.cron import entries
from tests.runtime.processes.test_nodes import kill
from tests.waiting import wait_until

SECONDS = min(60, max(8, int(os.environ.get("FAKTORY_SOAK_KILLS", "2"))))
pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.timeout(600 + 4 * SECONDS)]


def test_each_cron_tick_enqueues_one_job_while_nodes_are_killed(runfaktory):
    def start():
        return None, runfaktory("127.0.0.1:0", "--server-only", "--no-reload")

    nodes = [start() for _ in range(5)]
    for _, program in nodes:
        program.wait_for_log("server listens", timeout_s=60)
    entry = CronEntry(name="each second", schedule="* * * * * *", zone="UTC", jobtype="beat", missed="all")
    entries.save(entry, using="default")
    first = entry.next_at
    last = first + timedelta(seconds=SECONDS - 1)
    kills, begun = 0, time.monotonic()
    while CronEntry.objects.get(pk=entry.pk).next_at <= last:
        place = random.randrange(5)
        kill(nodes[place])
        nodes[place] = start()
        kills += 1
        threading.Event().wait(max(0, begun + kills - time.monotonic()))
    entries.pause([entry.pk], using="default")
    taken = CronRun.objects.filter(entry=entry)
    wait_until(lambda: taken.filter(tick=last).exists())
    runs = list(taken.filter(tick__lte=last).order_by("tick"))
    assert [run.tick for run in runs] == [first + timedelta(seconds=number) for number in range(SECONDS)]
    assert {run.outcome for run in runs} == {"enqueued"}
    assert Job.objects.filter(jid__in=[run.jid for run in runs]).count() == SECONDS
    assert Job.objects.filter(jobtype="beat").count() == taken.count()
    assert kills >= SECONDS // 3
    late = max((run.at - run.tick).total_seconds() for run in runs)
    print(f"{SECONDS} ticks, {kills} kills, the latest {late:.2f} s after its time")  # noqa: T201  (pytest -s shows it)
