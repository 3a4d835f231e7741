"""Promote the standby while the old primary is read-only and the address still leads to the old one."""

import json
import random
import time
from contextlib import closing

import pytest

from tests.faults.arena import SOON_S
from tests.faults.pair import Pair
from tests.faults.size import JOBS, scaled
from tests.faults.stores import programs_folder
from tests.server.raw import RawClient
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + JOBS // 5)]
MAKERS, TAKERS = 3, 4
STEP = "tests.faults.tasks.step"
SERVED_WITHIN_S = 5

ASKED = """
SELECT left(query, 200) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND query_start > %s
  AND query NOT LIKE '%%pg_notify%%'"""
"""Statements that reached the old primary since a moment, except notifications.

Notifications do no harm there, and their senders look for another server once a minute.
"""


@pytest.fixture
def pair():
    if programs_folder() is None:
        pytest.skip("left out: there is no pg_ctl on this machine; install PostgreSQL's server")
    made = Pair()
    yield made
    made.clean_up()


@pytest.fixture
def run(arena, pair):
    """Start a node, a pool of workers, makers for both and takers."""
    run = arena(pair)
    run.start_node()
    run.start_workers()
    run.start_takers(TAKERS, queue="a")
    run.start_makers(MAKERS, queue="a")
    run.start_makers(1, jobtype=STEP)
    run.await_progress("acked", 10)
    return run


def switch(run, pair):
    """Switch the address to the new primary; return the seconds until jobs were pushed, and run, again."""
    run.await_progress("refused", 3)
    time.sleep(random.uniform(0.5, 3))
    pair.switch_address()
    begun, before = time.monotonic(), steps(run)
    run.await_progress("ok")
    run.await_progress("acked")
    wait_until(lambda: steps(run) > before, SOON_S, what="our own workers run jobs")
    return time.monotonic() - begun


def steps(run):
    """Return how many tasks our own workers have ended; takers note theirs in other files."""
    return sum(path.read_bytes().count(b" end ") for path in run.folder.glob("w*.history"))


def await_due_jobs(run):
    """Check that threads that only read, such as the check for due jobs, have found the new primary too."""
    with closing(RawClient.identified(run.address(run.nodes()[0]))) as client:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 2))
        job = {"jid": "due-soon", "jobtype": "noop", "queue": "due", "args": [], "at": at}
        assert client.ask("PUSH " + json.dumps(job)) == b"+OK"
        wait_until(lambda: run.store.rows()["due-soon"] == "enqueued", every_s=0.1, what="due jobs are enqueued")
    run.store.primary.execute("DELETE FROM django_faktory_job WHERE queue = 'due'")


def test_connections_move_from_a_read_only_primary_to_the_new_one(run, pair):
    """FI-8: the old primary breaks no connection, it only refuses writes; code that only reads would not notice."""
    run.await_progress("ok", JOBS // 4)
    pair.take_no_writes()
    run.await_progress("refused", 3)
    pair.promote()
    took_s = switch(run, pair)
    await_due_jobs(run)
    [[since]] = pair.standby.execute("SELECT now()", database=pair.database)
    run.await_progress("ok", JOBS // 4)
    asked = pair.standby.execute(ASKED, since, database=pair.database)
    found = run.verdict()
    print(f"served {took_s:.1f} s after the address led to the new primary")  # noqa: T201
    assert found.lost == found.made_up == found.stuck == set()
    assert run.all_alive(), "no server and no worker exits"
    assert took_s <= SERVED_WITHIN_S
    assert asked == [], "no query reaches the old primary any more"


def test_repeated_failovers_lose_no_job_and_service_resumes_in_time(run, pair):
    """FI-8: the two servers exchange their roles several times."""
    took = []
    for _ in range(scaled(3)):
        run.await_progress("ok", JOBS // 4)
        pair.stop_primary()
        pair.promote()
        pair.follow()
        took.append(switch(run, pair))
    found = run.verdict()
    print(f"served {max(took):.1f} s after the address led to the new primary, at the latest")  # noqa: T201
    assert found.lost == found.made_up == found.stuck == set()
    assert run.all_alive(), "no server and no worker exits"
    assert max(took) <= SERVED_WITHIN_S
