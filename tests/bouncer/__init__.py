"""The tests through a PgBouncer that gives each transaction another session, and tests of what is different there."""

import pytest

from tests.settings import POOL, VIA

SESSIONS = 8
"""That PgBouncer has at most for each of the tests' databases. With fewer, threads of one test wait too long for each
other."""

SHARED = {"bouncer": SESSIONS, "pool": POOL}.get(VIA, 1)
"""Sessions that may have been ours, and may be ours next."""


def needs_session(reason):
    """Marks a test that is about what only a session of one's own can do."""
    return pytest.mark.skipif(VIA == "bouncer", reason=f"not through PgBouncer: {reason}")
