"""Configure glibc's malloc so that memory of large commands and many connections returns to the system.

`return_large_blocks` sets the options.
"""

from __future__ import annotations

import ctypes
import platform

MMAP_THRESHOLD_BYTES = 1024 * 1024
TRIM_THRESHOLD_BYTES = 8 * 1024 * 1024
ARENAS = 2
"""Few, because free memory in the arena of one thread is not available to other threads."""

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
    return all(is_set)
