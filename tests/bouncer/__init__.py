"""The tests through a PgBouncer that gives each transaction another session, and tests of what is different there."""

import pytest

from tests.settings import VIA


def needs_session(reason):
    """Marks a test that is about what only a session of one's own can do."""
    return pytest.mark.skipif(VIA == "bouncer", reason=f"not through PgBouncer: {reason}")
