"""Push, run, limit, lock and batch jobs from outside only, while programs die; then check the rules.

The seed determines the jobs and the faults; it is printed, and FAKTORY_OUTSIDE_SEED sets it. FAKTORY_OUTSIDE is the
number of attempts in the large size of `make soak`. In the small size, the profiles that provoke a single problem run
only on PostgreSQL.
"""

import os
import time

import pytest
from django.db import connection

JOBS = int(os.environ.get("FAKTORY_OUTSIDE", "0"))
SEED = int(os.environ.get("FAKTORY_OUTSIDE_SEED", time.time_ns() % 2**32))
pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.timeout(600 + JOBS)]
in_large_or_on_postgresql = pytest.mark.skipif(
    JOBS == 0 and connection.vendor != "postgresql", reason="FAKTORY_OUTSIDE runs it on this database"
)


def scaled(small, at_3000):
    return max(small, at_3000 * JOBS // 3000)


def test_no_job_is_lost_duplicated_or_over_its_limit_while_programs_die(begin):
    """Covers W14, W19, W20, W26, W29."""
    run = begin("mix", SEED)
    run.play(scaled(200, 3000), scaled(4, 60))
    assert run.finish(scaled(60, 240)) == {}


@pytest.mark.skipif(JOBS == 0 or connection.vendor == "sqlite", reason="FAKTORY_OUTSIDE runs it; SQLite has one node")
def test_no_job_is_lost_duplicated_or_over_its_limit_on_three_nodes(begin):
    run = begin("mix_on_three_nodes", SEED + 1)
    run.play(scaled(200, 3000), scaled(4, 60))
    assert run.finish(scaled(60, 240)) == {}


@in_large_or_on_postgresql
def test_changing_limits_under_running_jobs_are_enforced_without_job_loss(begin):
    run = begin("limits_change", SEED)
    run.play(scaled(120, 3000), seconds=8)
    assert run.finish(scaled(30, 120)) == {}


@in_large_or_on_postgresql
def test_a_limit_is_enforced_while_locks_reject_jobs(begin):
    run = begin("limits_and_locks", SEED)
    run.play(scaled(120, 1500), seconds=12)
    assert run.finish(scaled(30, 120)) == {}


@in_large_or_on_postgresql
@pytest.mark.skipif(connection.vendor == "sqlite", reason="a transaction that writes holds the whole file there")
def test_a_transaction_that_holds_a_unique_key_blocks_only_its_own_command(begin):
    run = begin("key_is_held", SEED)
    run.play(scaled(60, 2000), seconds=8)
    assert run.finish(scaled(30, 120)) == {}


@in_large_or_on_postgresql
def test_a_job_longer_than_its_reservation_runs_once_on_a_living_worker(begin):
    run = begin("long_jobs", SEED)
    run.play(scaled(8, 100))
    assert run.finish(scaled(30, 120)) == {}
