"""Kill PostgreSQL, end its sessions, make it read-only or fill its disk, under servers, workers and clients."""

import json
import random
import secrets
import time
from contextlib import closing

import pytest

from tests.faults.arena import pause_of_chance
from tests.faults.size import JOBS, scaled
from tests.server.raw import RawClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + JOBS // 5)]
MAKERS, TAKERS = 3, 4
STEP = "tests.faults.tasks.step"


@pytest.fixture
def run(arena, cluster):
    """Start a node, a pool of workers, makers for both and takers."""
    run = arena(cluster)
    run.start_node()
    run.start_workers(processes=1)
    run.start_takers(TAKERS, queue="a")
    run.start_makers(MAKERS, queue="a")
    run.start_makers(1, jobtype=STEP)
    run.await_progress("acked", 10)
    return run


def test_repeated_database_kills_lose_no_job(run, cluster):
    """Covers FI-3: each killed server restarts after 0.5 to 3 s."""
    slowest_s, stops = 0.0, scaled(4)
    for _ in range(stops):
        run.await_progress("ok", JOBS // stops)
        time.sleep(pause_of_chance())
        cluster.stop("immediate")
        time.sleep(random.uniform(0.5, 3))
        cluster.start()
        slowest_s = max(slowest_s, run.await_progress("ok"))
        run.await_progress("acked", 5)
    found = run.verdict()
    print(f"pushed again {slowest_s:.1f} s after the database came back, at the latest")  # noqa: T201
    assert found.lost == found.made_up == found.stuck == set()
    assert len(found.unsure) <= (MAKERS + 1) * stops
    assert run.all_alive(), "no server and no worker exits"
    assert longest_answer_s(run.history()) <= 10


def longest_answer_s(history):
    """Return the longest time from a PUSH to its refusal, in seconds."""
    sent = {note.rest[0]: note.at for note in history["sent"]}
    return max((note.at - sent[note.rest[0]] for note in history["refused"]), default=0.0)


def test_continuously_terminated_database_sessions_lose_no_job(run, cluster):
    """Covers FI-4: one random session is ended every 0.2 s."""
    ended, until = 0, time.monotonic() + max(5, 30 * JOBS / 5000)
    while time.monotonic() < until:
        ended += len(
            cluster.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid() ORDER BY random() LIMIT 1"
            )
        )
        time.sleep(0.2)
    run.await_progress("acked", 20)
    found = run.verdict()
    print(f"{ended} sessions ended")  # noqa: T201
    assert ended > 10
    assert found.lost == found.made_up == found.stuck == set()
    assert len(found.unsure) <= ended
    assert run.all_alive()
    assert run.logs().count("Traceback") == run.logs().count("ValueError: fails on purpose")


def test_a_read_only_database_rejects_pushes_and_recovers(run, cluster):
    """FI-8: the server becomes read-only, as a primary that has become a standby."""
    for _ in range(scaled(3)):
        run.await_progress("ok", 20)
        cluster.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        cluster.execute("SELECT pg_reload_conf()")
        run.await_progress("refused", 5)
        cluster.execute("ALTER SYSTEM RESET default_transaction_read_only")
        cluster.execute("SELECT pg_reload_conf()")
        run.await_progress("acked", 20)
    found = run.verdict()
    assert found.lost == found.made_up == found.stuck == found.unsure == set()
    assert run.all_alive()


def test_a_job_beyond_the_disk_space_is_rejected_and_others_run(run, cluster):
    """FI-8: no file of the server may grow beyond 17 MiB."""
    run.await_progress("ok", 20)
    cluster.stop()
    cluster.start(largest_file=17 * 2**20)
    run.await_progress("acked", 5)
    accepted = []
    with closing(RawClient.identified(run.address(run.nodes()[0]))) as client:
        for number in range(400):
            job = {"jid": f"big-{number}", "jobtype": "noop", "queue": "big", "args": [secrets.token_hex(60_000)]}
            reply = client.ask("PUSH " + json.dumps(job))
            if reply != b"+OK":
                break
            accepted.append(job["jid"])
        assert reply.startswith(b"-ERR"), "the disk had space for all jobs"
        run.await_progress("acked", 20)
        cluster.stop("immediate")
        cluster.start()
        run.await_progress("acked", 20)
        assert {jid for jid in cluster.rows() if jid.startswith("big-")} == set(accepted)
        cluster.execute("DELETE FROM django_faktory_job WHERE queue = 'big'")
    found = run.verdict()
    assert found.lost == found.made_up == found.stuck == set()
    assert run.all_alive()
