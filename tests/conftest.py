"""What all tests share. A server that is away skips a test, and fails it where CI=true."""

import os
import sys

import django
import hypothesis
import pytest
from django.db import connections

from tests import services
from tests.settings import KIND

# The machine may be busy: an example that takes long says nothing about the code.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


def pytest_report_header():
    database = services.DATABASES[KIND]()
    told = f"{database.name}: {database.missing}" if database.missing else str(database)
    return f"on: {told}, Django {django.__version__}, Python {sys.version.split(maxsplit=1)[0]}"


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup, django_db_blocker):
    """Before PostgreSQL drops the databases: sessions of processes that tests have killed may not have ended yet."""
    yield
    with django_db_blocker.unblock():
        for alias in connections:
            if connections[alias].vendor == "postgresql":
                with connections[alias].cursor() as cursor:
                    cursor.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    )
        connections.close_all()


@pytest.fixture(scope="session")
def redis_url():
    """The address of a Redis that answers."""
    _require(services.redis())
    return services.redis_url()


@pytest.fixture(scope="session")
def node_folder():
    """Where programs can `require("faktory-worker")`."""
    _require(services.node_client())
    return services.NODE_FOLDER


def _require(service):
    if service.missing:
        stop = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        stop(f"{service.name}: {service.missing}")
