"""Replace `runfaktory` by the supervisor without Django, by exec (`replace_process`, ADR 0012).

Also reads the orders of the children that this supervisor starts.
"""

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

from ...worker.process import CLEAN
from . import reexec_pipe, supervisor
from .child import log_parent_record
from .contract import SIGNALS, ChildSpec
from .forking import LOST_REPORT_S
from .supervisor import Child, Pipes

FOLDER = str(Path(__file__).parents[3])
"""The folder from which Python imports this package."""

SLIM = (
    "import sys; sys.path.append(sys.argv[2]); from django_faktory.runtime.supervisor import standalone; "
    "standalone.main(int(sys.argv[1]))"
)
"""The program of the new process: its arguments are the orders' file descriptor and `FOLDER`."""


def can_rerun_command() -> bool:
    """Return whether this process' own command line can be run again."""
    has_program = sys.argv[0] not in sys.orig_argv or sys.argv[0] == "-c" or Path(sys.argv[0]).is_file()
    return bool(sys.executable) and len(sys.orig_argv) > 1 and has_program


def replace_process(
    children: Sequence[Child],
    shared_pipes: Pipes,
    *,
    common: dict[str, Any],
    grace_s: float,
    silence_s: float,
    parent: int | None,
) -> None:
    """Continue as the supervisor without Django, under the same pid. Returns only if that is impossible.

    `common` is part of the orders of every child; the other keywords are those of `Supervisor`.
    """
    orders = {
        "command": [sys.executable, *sys.orig_argv[1:]],
        "common": common,
        "children": [vars(child) for child in children],
        "cords": vars(shared_pipes),
        "grace_s": grace_s,
        "silence_s": silence_s,
        "parent": parent,
        "level": logging.getLogger(supervisor.__name__).getEffectiveLevel(),
    }
    # Larger orders would block this process, since the pipe has no reader before exec.
    if not reexec_pipe.fits(orders):
        return
    # exec discards buffered output.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # signals stay pending until the supervisor has handlers
    # exec closes every file descriptor that is not inheritable.
    for descriptor in shared_pipes.descriptors():
        os.set_inheritable(descriptor, True)
    # -S leaves `site` out, which saves memory; -P leaves the working directory out of `sys.path`.
    reader = reexec_pipe.write(orders)
    with suppress(OSError):  # no memory, or the file was removed: continue as before
        os.execv(sys.executable, [sys.executable, "-P", "-S", "-c", SLIM, str(reader), FOLDER, *sys.argv])  # noqa: S606  (ourselves)
    os.close(reader)
    for descriptor in shared_pipes.descriptors():
        os.set_inheritable(descriptor, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def child_spec_of(orders: dict[str, Any]) -> ChildSpec:
    """Build the `ChildSpec` from a child's orders. The supervisor may run older or newer code than this process."""
    fields = {name: value for name, value in orders.items() if name in signature(ChildSpec).parameters}
    return ChildSpec(**fields | {"lost": tuple(orders["lost"])})


def report_killed_and_exit(killed: int, news: int, unregister: Callable[[list[str]], None]) -> NoReturn:
    """Wait for the supervisor's list of killed wids, report them with `unregister`, and exit.

    The pipe `killed` is closed without data if no child was killed.
    """
    try:
        with open(killed, "rb") as pipe:
            data = pipe.read()
        if data:
            # The children may have hung because the database does not answer.
            signal.alarm(LOST_REPORT_S)
            while log_parent_record(news):
                pass
            unregister(json.loads(data))
    finally:
        logging.shutdown()
        os._exit(CLEAN)
