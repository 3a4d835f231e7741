"""Provide two versions, and rollouts."""

import pytest

from tests.deploys import versions
from tests.deploys.rollout import Database, Rollout


@pytest.fixture
def two_versions(tmp_path):
    """Return this version, and a copy of it with another version number."""
    folder = tmp_path / "next"
    folder.mkdir()
    return versions.this(), versions.next_one(folder)


@pytest.fixture
def rollout(tmp_path, transactional_db):
    """Return a rollout on a separate database; end its programs and drop the database at the end."""
    folder = tmp_path / "history"
    folder.mkdir()
    database = Database(folder)
    run = Rollout(folder, database)
    yield run
    run.clean_up()
    print(run.text())  # noqa: T201  (shown where the test failed)
    database.drop()
