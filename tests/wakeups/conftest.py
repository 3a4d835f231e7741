"""Databases under names of their own, for listeners that must not be disturbed, or must be."""

from contextlib import closing

import pytest
from django.db import connection, connections

from django_faktory.wakeups import postgresql
from tests.settings import KIND

needs_hints = pytest.mark.skipif(
    KIND != "postgresql" or not postgresql.can_listen(), reason="about PostgreSQL with psycopg 3, which can listen"
)


@pytest.fixture
def client():
    """A driver's connection that listens, outside any pool: nobody else shall have it, and the pool is owed none."""
    wrapper = connection.copy()
    wrapper.settings_dict["OPTIONS"].pop("pool", None)
    with closing(wrapper.get_new_connection(wrapper.get_connection_params())) as found:
        found.autocommit = True
        found.execute("LISTEN django_faktory")
        yield found


@pytest.fixture
def database():
    """Register a database like the default one with other settings; gone again at the end."""
    added = []

    def add(alias, **settings):
        default = connections.settings["default"]
        connections.settings[alias] = {**default, "OPTIONS": dict(default["OPTIONS"]), **settings}
        added.append(alias)
        return alias

    yield add
    for alias in added:
        if hasattr(connections._connections, alias):
            del connections[alias]
        del connections.settings[alias]


@pytest.fixture
def closing_later():
    """Listeners to close at the end of the test."""
    listeners = []

    def keep(listener):
        listeners.append(listener)
        return listener

    yield keep
    for listener in listeners:
        listener.close()
