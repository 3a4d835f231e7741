"""Who runs a job of which key, as the kernel sees it: a file for each key, held by whoever is inside.

Two at once are seen, be they threads or processes, and who is killed is inside no more. Knows no Django.
"""

import fcntl
import os
from pathlib import Path


class Place:
    """The place of one key: entered when a job has come, left before its end is told."""

    def __init__(self, folder, key):
        self._file = os.open(Path(folder) / key.encode().hex()[-200:], os.O_RDWR | os.O_CREAT, 0o600)

    def enter(self, jid):
        """None, or the jid of the one that is inside already."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.pread(self._file, 1000, 0).decode() or "somebody"
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, jid.encode(), 0)
        return None

    def leave(self):
        """Closed, it is free."""
        os.close(self._file)
