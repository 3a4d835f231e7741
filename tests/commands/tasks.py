"""Tasks for worker processes: what they do is seen in files, and a named pipe lets them go on."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_faktory import task
from tests.project.models import Mark


@task
def writes_pid(path):
    Path(path).write_text(str(os.getpid()))


@task
def waits(folder):
    """Tells its process in `folder`/pid, and goes on when somebody writes to `folder`/pipe."""
    tell_pid(folder)
    (Path(folder) / "pipe").read_text()


@task
async def waits_async(folder):
    tell_pid(folder)
    await asyncio.to_thread((Path(folder) / "pipe").read_text)


@task
def never_ends(folder):
    tell_pid(folder)
    threading.Event().wait()


@task(timeout=0.5, max_attempts=1)
def never_ends_although_stopped(folder):
    """Waits in C, where no exception reaches it."""
    tell_pid(folder)
    threading.Event().wait()


@task
def poison(folder):
    """Takes the whole process with it, each time."""
    with (Path(folder) / "deaths").open("a") as file:
        file.write(f"{os.getpid()}\n")
    os._exit(9)


_kept = []


@task
def keeps_memory(mb):
    """Leaks, and touches what it leaks: each page becomes this process' own."""
    _kept.append(b"\xff" * (mb * 2**20))


def tell_pid(folder):
    """Complete or absent: who reads it must not see half a number."""
    path = Path(folder) / "pid"
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


@task
def leaves_a_process_behind():
    """Its parent ends at once: whoever is process 1 inherits it."""
    subprocess.run(["sh", "-c", "sleep 1 &"], check=True)


def go_on(folder, name, restarts):
    """One step of the job `name` after the other, from the one that an earlier run reached: one for each restart."""
    path = Path(folder) / f"{name}.steps"
    path.touch()
    while (done := path.stat().st_size) < restarts:
        if (Path(folder) / "restarts").stat().st_size > done:
            path.write_bytes(b"." * (done + 1))
        yield


@contextmanager
def noted(folder, name):
    """Write down when a run of this job began and ended, outside of the database."""
    begun_at = time.monotonic()
    try:
        yield
    finally:
        with (Path(folder) / f"{name}.runs").open("a") as file:
            file.write(f"{begun_at} {time.monotonic()} {os.getpid()}\n")


STEP_S = 0.02


def steps_of(folder, name, restarts):
    with noted(folder, name):
        for _ in go_on(folder, name, restarts):
            time.sleep(STEP_S)


@task(max_attempts=1)
def is_long(folder, name, restarts):
    steps_of(folder, name, restarts)


@task(max_attempts=1)
async def is_long_and_async(folder, name, restarts):
    with noted(folder, name):
        for _ in go_on(folder, name, restarts):
            await asyncio.sleep(STEP_S)


@task(max_attempts=1, atomic=True)
def is_long_and_atomic(folder, name, restarts):
    steps_of(folder, name, restarts)
    Mark.objects.create(text=name)


@task(max_attempts=1, lock=lambda folder, name, restarts: f"lock {int(name) % 20}")
def is_long_and_locks(folder, name, restarts):
    steps_of(folder, name, restarts)


@task(max_attempts=1, limit=4)
def is_long_and_limited(folder, name, restarts):
    steps_of(folder, name, restarts)


LONG = (is_long, is_long_and_async, is_long_and_atomic, is_long_and_locks, is_long_and_limited)


def _begins(folder):
    with (Path(folder) / "begun").open("a") as file:
        file.write(f"{os.getpid()}\n")


@task
def runs_long(folder):
    """Notes that it began, and goes on when the pipe says so."""
    _begins(folder)
    (Path(folder) / "pipe").read_text()


@task(atomic=True)
def runs_long_atomic(folder):
    _begins(folder)
    (Path(folder) / "pipe").read_text()


@task
async def runs_long_async(folder):
    _begins(folder)
    await asyncio.to_thread((Path(folder) / "pipe").read_text)


CATASTROPHE = re.compile("(a+)+$")


@task(timeout=3)
def holds_the_gil(folder):
    """A regular expression that takes 2 to the power of 60 steps; until it ends no other thread of the process runs."""
    with (Path(folder) / "runs").open("a") as file:
        file.write(f"{os.getpid()}\n")
    tell_pid(folder)
    CATASTROPHE.match("a" * 60 + "b")


@task
async def blocks_the_loop(folder):
    """Waits as a function would, not as a coroutine."""
    tell_pid(folder)
    (Path(folder) / "pipe").read_text()


LONGEST_ALONE_S = 3.0


@task
def dies_beside_another(folder):
    """Takes the process with it once `runs_beside_it` runs there; alone it waits for that in vain, and dies too."""
    deaths = Path(folder) / "deaths"
    wait_for(lambda: _count(Path(folder) / "runs") > _count(deaths), LONGEST_ALONE_S)
    with deaths.open("a") as file:
        file.write(f"{os.getpid()}\n")
    os._exit(9)


@task
def runs_beside_it(folder):
    with (Path(folder) / "runs").open("a") as file:
        file.write(f"{os.getpid()}\n")
    wait_for(lambda: False, 2 * LONGEST_ALONE_S)


def wait_for(condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not condition():
        time.sleep(0.01)


def _count(path):
    return len(path.read_text().split()) if path.exists() else 0


def block_main_thread(*_):
    """In a server that is the thread of its event loop. Its other threads go on."""
    time.sleep(120)


if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGUSR1, block_main_thread)


@task
def counts_logged_queries():
    """Statements that this process keeps for `connection.queries`: of this job, and of the worker itself."""
    Mark.objects.count()
    own = sum("mark" in query["sql"] for one in connections.all() for query in one.queries_log)
    wrappers = [one for one in gc.get_objects() if isinstance(one, BaseDatabaseWrapper)]
    return own, sum("faktory" in query["sql"] for one in wrappers for query in list(one.queries_log))
