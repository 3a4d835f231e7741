"""Provide workers in threads, programs of two versions, and rollouts."""

import os

import pytest
from django.apps import apps

from tests.deploys import versions
from tests.deploys.rollout import Database, Rollout
from tests.runtime.processes.conftest import address, runfaktory
from tests.worker.conftest import state, work

__all__ = ["address", "runfaktory", "state", "work"]


@pytest.fixture
def changed_models():
    """Return all models that have a table of this package."""
    models = apps.get_app_config("django_faktory").get_models()
    return [model for model in models if model._meta.managed and not model._meta.proxy]


@pytest.fixture
def next_version(tmp_path, changed_models):
    """Return this version, and a copy of it with one more migration."""
    folder = tmp_path / "next"
    folder.mkdir()
    return versions.this(), versions.next_one(folder, changed_models)


@pytest.fixture
def two_versions(request, tmp_path):
    """Return the older and the newer version.

    They are the release in FAKTORY_PREVIOUS and this one, or this one and its copy with one more migration.
    """
    if named := os.environ.get("FAKTORY_PREVIOUS"):
        folder = tmp_path / "previous"
        folder.mkdir()
        return versions.previous(folder, named), versions.this()
    return request.getfixturevalue("next_version")


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
