"""Fixtures for pytest: `pytest_plugins = ["django_faktory.testing.pytest_plugin"]` in the topmost conftest.py.

Needs pytest and pytest-django. There is no entry point: it would import this package before every test run of every
project that has it installed, and before coverage starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .live import LiveFaktory


@pytest.fixture
def live_faktory(transactional_db: None) -> Iterator[LiveFaktory]:  # noqa: ARG001  (used for its effect)
    """Fixture of pytest: a `LiveFaktory` that runs during the test, for which its transactions commit."""
    from .live import LiveFaktory  # imports models, so only after Django is set up

    with LiveFaktory() as live:
        yield live
