"""Exit codes of worker processes, and their ids (`new_wid`)."""

from __future__ import annotations

import os

CLEAN, CANNOT_START, RECYCLE, CRASHED = 0, 3, 4, 70
"""Exit codes of a child. RECYCLE is a clean exit after which the child is replaced at once; every other code counts
as CRASHED.
"""


def new_wid() -> str:
    """Return a random wid that no other worker process has used."""
    return os.urandom(8).hex()
