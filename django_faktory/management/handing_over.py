"""How `runfaktory` becomes the supervisor without Django, and what a child of that is told (ADR 0012)."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

from ..worker import supervisor
from ..worker.forking import FAREWELL_S
from ..worker.launch import publish
from ..worker.supervisor import Child, Cords
from ..worker.terms import CLEAN, SIGNALS, Launch
from . import orders

FOLDER = str(Path(__file__).parent.parent.parent)
"""Where Python finds this package."""

SLIM = (
    "import sys; sys.path.append(sys.argv[2]); from django_faktory.management import slim; slim.main(int(sys.argv[1]))"
)


def can_start_anew() -> bool:
    """Whether this process' own command line would start it again."""
    is_there = sys.argv[0] not in sys.orig_argv or sys.argv[0] == "-c" or Path(sys.argv[0]).is_file()
    return bool(sys.executable) and len(sys.orig_argv) > 1 and is_there


def become_slim(
    children: Sequence[Child],
    cords: Cords,
    *,
    common: dict[str, Any],
    grace_s: float,
    silence_s: float,
    parent: int | None,
) -> None:
    """Go on as the supervisor without Django, under the same pid. Returns where that cannot be done."""
    told = {
        "command": [sys.executable, *sys.orig_argv[1:]],
        "common": common,
        "children": [vars(child) for child in children],
        "cords": vars(cords),
        "grace_s": grace_s,
        "silence_s": silence_s,
        "parent": parent,
        "level": logging.getLogger(supervisor.__name__).getEffectiveLevel(),
    }
    if not orders.fits(told):
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # what comes from now on waits for the supervisor
    for end in cords.ends():
        os.set_inheritable(end, True)
    reader = orders.write(told)
    with suppress(OSError):  # no memory, or no such file any more: it goes on as it is
        os.execv(sys.executable, [sys.executable, "-P", "-S", "-c", SLIM, str(reader), FOLDER, *sys.argv])  # noqa: S606  (ourselves)
    os.close(reader)
    for end in cords.ends():
        os.set_inheritable(end, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def launch_of(told: dict[str, Any]) -> Launch:
    """Read the launch in a child's orders. The supervisor may run older or newer code than this process."""
    known = {name: value for name, value in told.items() if name in signature(Launch).parameters}
    return Launch(**known | {"lost": tuple(told["lost"])})


def say_farewell(killed: int, news: int, farewell: Callable[[list[str]], None]) -> NoReturn:
    """Wait in this process until the supervisor says who was killed, or that nobody was."""
    try:
        with open(killed, "rb") as pipe:
            found = pipe.read()
        if found:
            signal.alarm(FAREWELL_S)
            while publish(news):
                pass
            farewell(json.loads(found))
    finally:
        logging.shutdown()
        os._exit(CLEAN)
