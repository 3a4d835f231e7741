"""Kill workers, or suspend them for longer than WORKER_TIMEOUT, while clients push."""

import json
import os
import random
import signal
import time
from contextlib import closing

import psutil
import pytest

from django_faktory.worker.worker import MAX_PREFETCH
from tests.faults.arena import FAST, kill, pause_of_chance
from tests.faults.size import JOBS, scaled
from tests.server.raw import RawClient

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.timeout(600 + JOBS // 5)]
CONCURRENCY = 4
STEP = "tests.faults.tasks.step"


def test_killed_workers_lose_no_job_and_repeat_only_the_jobs_they_held(arena, database):
    """FI-2: kill the whole pool, one of its processes, or only the parent."""
    run = arena(database)
    run.start_node()
    pools = [run.start_workers(processes=2, concurrency=CONCURRENCY) for _ in range(2)]
    run.start_makers(3, jobtype=STEP)
    kills = scaled(20)
    for _ in range(kills):
        run.await_progress("end", JOBS // kills)
        time.sleep(pause_of_chance())
        place = random.randrange(2)
        if random.random() < 0.5 and (child := one_of(pools[place].children())):
            child.kill()
            continue
        if random.random() < 0.5:
            os.kill(pools[place].pid, signal.SIGKILL)  # its processes notice, and end
        else:
            kill(pools[place])
        pools[place] = run.start_workers(processes=2, concurrency=CONCURRENCY)
    found = run.verdict()
    assert found.lost == found.made_up == found.unsure == found.stuck == set()
    assert max(found.doubled.values(), default=0) <= 2, "the third loss is the last"
    assert found.doubled.total() <= 2 * kills * (CONCURRENCY + MAX_PREFETCH)


def one_of(children):
    return random.choice([child for child in children if child.status() != psutil.STATUS_ZOMBIE] or [None])


def test_late_reports_of_suspended_clients_change_nothing(arena, database):
    """FI-6: each job ends once, even if a suspended taker reports it later."""
    run = arena(database)
    node = run.start_node()
    takers = run.start_takers(6)
    run.start_makers(2)
    rounds, at_once = scaled(25), 4
    for _ in range(rounds):
        run.await_progress("end", 5)
        still = random.sample(takers, at_once)
        for taker in still:
            taker.signal(signal.SIGSTOP)
            time.sleep(random.uniform(0, 0.02))
        time.sleep(FAST["WORKER_TIMEOUT"] + 1)
        run.await_progress("end", 5)
        for taker in still:
            taker.signal(signal.SIGCONT)
    found = run.verdict()
    assert found.lost == found.made_up == found.unsure == found.stuck == set()
    assert found.doubled.total() <= rounds * at_once
    with closing(RawClient.identified(run.address(node))) as client:
        assert json.loads(client.ask("INFO"))["faktory"]["total_processed"] == found.accepted
