"""Test through a PgBouncer that may run each transaction in a different session."""

import pytest

from tests.settings import POOL, VIA

SESSIONS = 8
"""Maximum number of PgBouncer's sessions for each test database.

With fewer, threads of one test wait too long for a session.
"""

SHARED = {"bouncer": SESSIONS, "pool": POOL}.get(VIA, 1)
"""Number of sessions that connections of the tests share."""


def needs_session(reason):
    """Skip a test through PgBouncer, because it needs a session that no other client uses."""
    return pytest.mark.skipif(VIA == "bouncer", reason=f"not through PgBouncer: {reason}")
