"""Configure glibc's malloc so that memory of large commands and many connections returns to the system.

`return_large_blocks` sets the options and starts a thread that trims the heap.
"""

from __future__ import annotations

import ctypes
import platform
import resource
import threading
from pathlib import Path

MMAP_THRESHOLD_BYTES = 1024 * 1024
TRIM_THRESHOLD_BYTES = 8 * 1024 * 1024
ARENAS = 2
"""Few, because free memory in the arena of one thread is not available to other threads."""

GROWTH_BYTES = 32 * 1024 * 1024
"""Free memory is returned while the process is larger by this much than at its start."""

CHECK_S = 5.0
"""Seconds between checks of the resident memory."""

_OPTIONS = (
    (-3, MMAP_THRESHOLD_BYTES),  # M_MMAP_THRESHOLD of malloc.h
    (-1, TRIM_THRESHOLD_BYTES),  # M_TRIM_THRESHOLD
    (-8, ARENAS),  # M_ARENA_MAX
)


def return_large_blocks() -> bool:
    """Have malloc map large blocks one by one and use few arenas. Returns False where libc is not glibc.

    By default glibc raises its threshold to the largest block that was freed, up to 32 MiB. Then a command of 16 MiB
    is allocated in the heap, or in the arena of a thread, below small blocks that stay. Three attacks left 179 to 355
    MB allocated with a higher threshold, and 5 to 176 MB with this one.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    is_set = [mallopt(name, value) == 1 for name, value in _OPTIONS]
    threading.Thread(target=_return_free_pages, name="allocator", daemon=True).start()
    return all(is_set)


def _return_free_pages() -> None:
    """Trim the heap while the process is larger than at its start: malloc itself returns only the top of the heap."""
    trim, pause = ctypes.CDLL(None).malloc_trim, threading.Event()
    at_start = _resident_bytes()
    while not pause.wait(CHECK_S):
        # Not compared with the size after the last trim: if the memory was in use during that trim, no later trim
        # would return it. A repeated trim takes up to 15 ms for 300 MB of fragments.
        if _resident_bytes() > at_start + GROWTH_BYTES:
            trim(0)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
