"""Wake a waiting thread when a file is written, with Linux's inotify through the C library.

Knows no database and no job rows.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable

_MODIFY = 0x2
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)


class FileWatch:
    """A file descriptor that becomes readable once one of these files is written. Missing files are ignored."""

    def __init__(self, paths: Iterable[str]) -> None:
        """Raises OSError if the system has no inotify or none of the files exists."""
        if sys.platform != "linux":
            raise OSError("only Linux reports writes")
        libc = ctypes.CDLL(None, use_errno=True)
        # The standard library has no inotify; ctypes avoids a dependency for two functions.
        self._watch = libc.inotify_add_watch
        self._fd: int = libc.inotify_init1(_NONBLOCK_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1 failed")
        watched = [path for path in paths if self._add(path)]
        if not watched:
            self.close()
            raise OSError("no file to watch")

    def _add(self, path: str) -> bool:
        return bool(self._watch(self._fd, os.fsencode(path), _MODIFY) >= 0)

    def fileno(self) -> int:
        """Return the descriptor, for select and poll."""
        return self._fd

    def clear(self) -> bool:
        """Discard the events so far; return whether there were any."""
        try:
            # The events are not parsed: that any file was written is enough.
            return bool(os.read(self._fd, 65_536))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
