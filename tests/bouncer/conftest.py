"""Provide a PgBouncer, connections through it, and the programs of tests/commands."""

import pytest
from django.db import connection

from django_faktory.store.dialects.postgresql.prepared import Command
from tests import services
from tests.bouncer.bouncer import Bouncer
from tests.runtime.processes.conftest import address, runfaktory
from tests.store.notifier.conftest import closing_later

__all__ = ["address", "closing_later", "runfaktory"]


@pytest.fixture
def bouncer(transactional_db):
    """Return a function that starts a PgBouncer; stop it at the end. Skip if the program is not installed."""
    service = services.pgbouncer()
    if service.missing:
        pytest.skip(f"left out: {service.name}: {service.missing}")
    started = []

    def start(mode="transaction"):
        started.append(Bouncer(mode))
        return started[-1]

    yield start
    for one in started:
        print(one.log())  # noqa: T201  (shown where the test failed)
        one.clean_up()


@pytest.fixture
def change_connection(transactional_db):
    """Return a function that changes the settings of the test's connections; restore them at the end."""
    before = {name: connection.settings_dict[name] for name in ("HOST", "PORT", "OPTIONS")}

    def change(**settings):
        connection.close()
        connection.close_pool()
        connection.settings_dict.update(settings)

    yield change
    connection.close()
    connection.close_pool()
    connection.settings_dict.update(before)
    Command.works = True


@pytest.fixture
def behind(bouncer, change_connection):
    """Return a function that routes the test's connections through a PgBouncer."""

    def start(mode="transaction"):
        change_connection(HOST="127.0.0.1", PORT=str(bouncer(mode).port))

    return start
