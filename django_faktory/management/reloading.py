"""`--reload`: Django's autoreloader around a `runfaktory` of its own process.

The reloader watches in threads, and who forks must have none: so the work is done by a child command without
`--reload`, which is told to stop, and waited for, before the reloader starts everything anew.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from collections.abc import Callable

from django.utils import autoreload

PARENT_VARIABLE = "DJANGO_FAKTORY_STOP_WITHOUT"
"""Set for the child command: the process it must not outlive."""


def run_with_reloader(load: Callable[[], None]) -> None:
    """Run this same command again and again, each time the code changes. `load` imports what is to be watched."""
    autoreload.run_with_reloader(_run_child, load)


def parent_to_stop_without() -> int | None:
    """The reloader that started this process, if one did."""
    found = os.environ.get(PARENT_VARIABLE)
    return int(found) if found else None


def _run_child(load: Callable[[], None]) -> None:
    load()
    child = subprocess.Popen(  # noqa: S603  (our own command line)
        [*autoreload.get_child_arguments(), "--no-reload"],
        env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        start_new_session=True,  # a terminal's Ctrl-C reaches the reloader, which passes it on as TERM, once
    )
    reloading = threading.Event()
    atexit.register(_stop, child, reloading)
    code = child.wait()
    if not reloading.is_set():
        # It ended by itself, and no change of code will come of that. 3 means "once more" to Django's reloader.
        os._exit(1 if code else 0)


def _stop(child: subprocess.Popen[bytes], reloading: threading.Event) -> None:
    reloading.set()
    child.terminate()
    child.wait()
