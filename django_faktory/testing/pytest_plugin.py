"""Fixtures for pytest: `pytest_plugins = ["django_faktory.testing.pytest_plugin"]` in the topmost conftest.py.

Needs pytest and pytest-django. No entry point: one would import this package before every test run of every project
that has it installed, and before coverage begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .live import LiveFaktory


@pytest.fixture
def live_faktory(transactional_db: None) -> Iterator[LiveFaktory]:  # noqa: ARG001  (what it runs on)
    """A server and a worker beside the test."""
    from .live import LiveFaktory  # models: when Django is set up

    with LiveFaktory() as live:
        yield live
