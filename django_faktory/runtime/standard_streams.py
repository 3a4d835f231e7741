"""Reopen standard streams that the caller has closed, as by `runfaktory >&-` (`reopen_closed_streams`).

Imports the standard library only.
"""

from __future__ import annotations

import os
import sys

_STREAMS = ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w"))


def reopen_closed_streams() -> bool:
    """Open the null device for each closed standard stream; return whether one was closed.

    Python has None in place of a closed stream, which cannot be written to. Also, the next socket or file would get the
    stream's file descriptor, and child processes would use it as their standard stream.
    """
    closed = [stream for stream in _STREAMS if getattr(sys, stream[1]) is None]
    for number, name, mode in closed:
        null = os.open(os.devnull, os.O_RDWR)
        if null == number or _is_closed(number):
            os.dup2(null, number)
            os.set_inheritable(number, True)  # for child programs; dup2 onto the same number leaves the flag as it is
        setattr(sys, name, open(os.dup(null), mode))  # noqa: SIM115  (open until the process ends)
        if null != number:
            os.close(null)
    return bool(closed)


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False
