"""Fixtures for listeners: databases under other aliases, and connections that no other test uses."""

from contextlib import closing

import pytest
from django.db import connection, connections

from django_faktory.store.dialects.postgresql.pipeline import has_psycopg3
from tests.settings import KIND

needs_notifications = pytest.mark.skipif(
    KIND != "postgresql" or not has_psycopg3(), reason="about PostgreSQL with psycopg 3, which can listen"
)


@pytest.fixture
def client():
    """Return a driver connection that listens. It is outside any pool, so that no other code gets it from there."""
    wrapper = connection.copy()
    wrapper.settings_dict["OPTIONS"].pop("pool", None)
    with closing(wrapper.get_new_connection(wrapper.get_connection_params())) as found:
        found.autocommit = True
        found.execute("LISTEN django_faktory")
        yield found


@pytest.fixture
def database():
    """Return a function that registers a copy of the default database with other settings; removed at the end of the
    test.
    """
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
    """Return a function that registers a listener to be closed at the end of the test."""
    listeners = []

    def keep(listener):
        listeners.append(listener)
        return listener

    yield keep
    for listener in listeners:
        listener.close()
