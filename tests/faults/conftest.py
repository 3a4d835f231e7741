"""Runs with faults take minutes: `make faults`, which sets FAKTORY_FAULTS to the number of jobs of a run."""

import os
import random
import time

import pytest

from tests.faults import size
from tests.faults.arena import Arena
from tests.faults.stores import Cluster, TestDatabase, programs_folder

if not size.JOBS:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _seed():
    """Printed, so that the moments of a run that failed can be had again."""
    seed = int(os.environ.get("FAKTORY_FAULTS_SEED", time.time_ns() % 2**32))
    random.seed(seed)
    print(f"FAKTORY_FAULTS_SEED={seed}")  # noqa: T201  (shown where the test failed)


@pytest.fixture
def arena(tmp_path):
    """Start an Arena over a store; all of it is ended at the end."""
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
    """The test's own, for programs."""
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
    """A PostgreSQL that may be stopped, with an empty database."""
    _cluster.new_database()
    return _cluster
