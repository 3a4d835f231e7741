"""Start runs over the test's own database, and end every program that they started."""

import pytest

from tests.faults.stores import TestDatabase
from tests.outside.match import Match


@pytest.fixture
def begin(tmp_path, transactional_db):
    """Return a function that starts a run of a profile."""
    begun = []

    def start(profile, seed):
        begun.append(Match(tmp_path, TestDatabase(), profile, seed))
        begun[-1].begin()
        return begun[-1]

    yield start
    for one in begun:
        one.clean_up()
        print(one.text())  # noqa: T201  (shown where the test failed)
