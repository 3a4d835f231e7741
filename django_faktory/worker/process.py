"""Exit codes of worker processes, and their ids (`new_wid`)."""

from __future__ import annotations

import os

CLEAN, CANNOT_START, RECYCLE, CRASHED = 0, 3, 4, 70
"""Exit codes of a child. CANNOT_START also ends its supervisor, because a restart would fail in the same way. RECYCLE
is a clean exit after which the child is replaced at once. Codes that are not listed here count as CRASHED.
"""


def new_wid() -> str:
    """Return a random wid that no other worker process has used."""
    return os.urandom(8).hex()
