"""What all tests share. A server that is away skips a test, and fails it where CI=true."""

import os
import sys

import django
import hypothesis
import pytest

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
