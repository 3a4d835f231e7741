"""Databases under names of their own, for listeners that must not be disturbed, or must be."""

import pytest
from django.db import connections


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
