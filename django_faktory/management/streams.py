"""Standard streams that the caller has closed (`runfaktory >&-`). Imports the standard library only."""

from __future__ import annotations

import os
import sys

_STREAMS = ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w"))


def open_closed() -> bool:
    """Open the null device for each standard stream that is closed; returns whether one was.

    Python has None in its place, which cannot be written to. And the next socket or file would get its number, which
    the processes that this one starts take for their standard stream.
    """
    closed = [stream for stream in _STREAMS if getattr(sys, stream[1]) is None]
    for number, name, mode in closed:
        null = os.open(os.devnull, os.O_RDWR)
        if null == number or _is_closed(number):
            os.dup2(null, number)
            os.set_inheritable(number, True)  # for programs that this one starts; dup2 onto itself does nothing
        setattr(sys, name, open(os.dup(null), mode))  # noqa: SIM115  (as long as the process lives)
        if null != number:
            os.close(null)
    return bool(closed)


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False
