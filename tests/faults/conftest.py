"""Runs with faults take minutes: `make faults` sets FAKTORY_FAULTS to the number of jobs of a run."""

import os
import random
import time
from pathlib import Path

import pytest

from tests.faults import size
from tests.faults.arena import Arena
from tests.faults.stores import Cluster, TestDatabase, programs_folder

if not size.JOBS:  # long jobs have a size of their own
    collect_ignore = [one.name for one in Path(__file__).parent.glob("test_*.py") if one.name != "test_long_jobs.py"]


@pytest.fixture(autouse=True)
def _seed():
    """Seed the random moments of a run, and print the seed so that a failed run can be repeated."""
    seed = int(os.environ.get("FAKTORY_FAULTS_SEED", time.time_ns() % 2**32))
    random.seed(seed)
    print(f"FAKTORY_FAULTS_SEED={seed}")  # noqa: T201  (shown where the test failed)


@pytest.fixture
def arena(tmp_path):
    """Return a function that starts an Arena on a store; all arenas are cleaned up at the end."""
    begun = []

    def start(store, **settings):
        begun.append(Arena(tmp_path, store, **settings))
        return begun[-1]

    yield start
    for one in begun:
        one.clean_up()
        print(one.text())  # noqa: T201  (shown where the test failed)


@pytest.fixture
def database(transactional_db):
    """Return the test's own database, as a store for programs."""
    return TestDatabase()


@pytest.fixture(scope="session")
def _cluster():
    if programs_folder() is None:
        pytest.skip("left out: there is no pg_ctl on this machine; install PostgreSQL's server")
    cluster = Cluster()
    yield cluster
    cluster.clean_up()


@pytest.fixture
def cluster(_cluster):
    """Return a PostgreSQL server that the test may stop, with an empty database."""
    _cluster.new_database()
    return _cluster
