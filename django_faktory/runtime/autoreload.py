"""`--reload`: run `runfaktory` in a child process under Django's autoreloader (`run_with_reloader`).

The reloader watches files in threads, and a process that forks must not have threads. So a child command without
`--reload` does the work; it has ended before the reloader restarts.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from collections.abc import Callable

from django.utils import autoreload

PARENT_VARIABLE = "DJANGO_FAKTORY_STOP_WITHOUT"
"""Environment variable of the child command: the pid of the process that it must not outlive."""


def run_with_reloader(load: Callable[[], None]) -> None:
    """Run this command again after each change of code. `load` imports the modules to watch."""
    autoreload.run_with_reloader(_run_child, load)


def get_reloader_pid() -> int | None:
    """Return the pid of the reloader that started this process; None without one."""
    pid = os.environ.get(PARENT_VARIABLE)
    return int(pid) if pid else None


def _run_child(load: Callable[[], None]) -> None:
    load()
    child = subprocess.Popen(  # noqa: S603  (our own command line)
        # Explicit, because reloading is the default while DEBUG is on.
        [*autoreload.get_child_arguments(), "--no-reload"],
        env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        start_new_session=True,  # Ctrl-C reaches only the reloader, which sends one TERM
    )
    reloading = threading.Event()
    # After a change, Django's reloader exits this process with code 3, which runs `_stop`.
    atexit.register(_stop, child, reloading)
    code = child.wait()
    if not reloading.is_set():
        # The child ended without a change of code. Exit code 3 would make Django's reloader run it again.
        os._exit(1 if code else 0)


def _stop(child: subprocess.Popen[bytes], reloading: threading.Event) -> None:
    reloading.set()
    child.terminate()
    child.wait()
