"""Kill or gracefully stop servers while clients push and take jobs."""

import time

import pytest

from tests.faults.arena import pause_of_chance
from tests.faults.size import JOBS, scaled

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.timeout(600 + JOBS // 5)]
MAKERS, TAKERS = 4, 6


def test_a_repeatedly_killed_server_loses_no_accepted_job(arena, database):
    """Covers FI-1, and on SQLite FI-10."""
    run = arena(database)
    run.start_node()
    run.start_takers(TAKERS)
    run.start_makers(MAKERS)
    slowest_s, kills = 0.0, scaled(10)
    for _ in range(kills):
        run.await_progress("ok", JOBS // kills)
        time.sleep(pause_of_chance())
        run.kill_node(run.nodes()[0])
        run.start_node()
        slowest_s = max(slowest_s, run.await_progress("ok"))
    found = run.verdict()
    print(f"{kills} kills, pushed again {slowest_s:.1f} s after the new server listened at the latest")  # noqa: T201
    assert found.lost == found.made_up == found.stuck == set()
    assert len(found.unsure) <= MAKERS * kills
    assert found.doubled.total() == 0, "no taker died, and each ACK reached a server in the end"
    assert database.is_sound()
    assert "locked" not in str(run.history()["error-reply"] + run.history()["refused"])


def test_a_rolling_restart_of_servers_neither_loses_nor_duplicates_jobs(arena, database):
    """Covers FI-9: a rolling restart."""
    run = arena(database)
    run.start_node(), run.start_node()
    run.start_takers(TAKERS)
    run.start_makers(MAKERS)
    ends = []
    for _ in range(scaled(10)):
        run.start_node()
        run.await_progress("ok", JOBS // scaled(10))
        ends.append(run.stop_node(run.nodes()[0]))
    found = run.verdict()
    print(f"ended after {max(took for _, took in ends):.1f} s at the latest")  # noqa: T201
    assert found.lost == found.made_up == found.stuck == set()
    assert found.doubled.total() == 0
    assert [code for code, _ in ends] == [0] * len(ends)
    assert max(took for _, took in ends) <= 30
