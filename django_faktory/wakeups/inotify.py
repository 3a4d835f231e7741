"""Wakes who waits when a file is written: Linux's inotify, through the C library. Knows no database and no job rows."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable

_MODIFY = 0x2
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)


class FileWatch:
    """A descriptor that is readable once one of these files was written. Files that are missing are left out."""

    def __init__(self, paths: Iterable[str]) -> None:
        """Raises OSError where this system cannot."""
        if sys.platform != "linux":
            raise OSError("only Linux tells of writes")
        libc = ctypes.CDLL(None, use_errno=True)
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
        """For select."""
        return self._fd

    def clear(self) -> bool:
        """Forget the writes so far; whether there were any."""
        try:
            return bool(os.read(self._fd, 65_536))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Watch no more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
