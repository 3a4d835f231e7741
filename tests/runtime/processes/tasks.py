"""Tasks for worker processes. They record their effects in files, and wait until a named pipe is written to."""

import asyncio
import gc
import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_faktory import task
from tests.gil import hold_gil
from tests.project.models import Mark


@task
def writes_pid(path):
    Path(path).write_text(str(os.getpid()))


@task
def waits(folder):
    """Write the pid to `folder`/pid, and return when the test writes to `folder`/pipe."""
    write_pid(folder)
    (Path(folder) / "pipe").read_text()


@task(takes_context=True)
def awaits_approval(context):
    return context.wait_for("approved")


@task
async def waits_async(folder):
    write_pid(folder)
    await asyncio.to_thread((Path(folder) / "pipe").read_text)


@task
def never_ends(folder):
    write_pid(folder)
    threading.Event().wait()


@task(timeout=0.5, max_attempts=1)
def never_ends_although_stopped(folder):
    """Wait in C, where no exception reaches the thread."""
    write_pid(folder)
    threading.Event().wait()


_kept = []


@task
def keeps_memory(mb):
    """Leak memory and write to it, so that each page belongs to this process."""
    _kept.append(b"\xff" * (mb * 2**20))


def write_pid(folder):
    """Write the pid atomically: a reader must not see half a number."""
    path = Path(folder) / "pid"
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


@task
def leaves_a_process_behind():
    """Start a process that outlives its parent and is inherited by process 1."""
    subprocess.run(["sh", "-c", "sleep 1 &"], check=True)


def remaining_steps(folder, name, restarts):
    """Do the steps of the job `name`, one for each restart. Continue at the step that an earlier run reached."""
    path = Path(folder) / f"{name}.steps"
    path.touch()
    while (done := path.stat().st_size) < restarts:
        if (Path(folder) / "restarts").stat().st_size > done:
            path.write_bytes(b"." * (done + 1))
        yield


@contextmanager
def noted(folder, name):
    """Record outside of the database when a run of this job began and ended."""
    begun_at = time.monotonic()
    try:
        yield
    finally:
        with (Path(folder) / f"{name}.runs").open("a") as file:
            file.write(f"{begun_at} {time.monotonic()} {os.getpid()}\n")


STEP_S = 0.02


def steps_of(folder, name, restarts):
    with noted(folder, name):
        for _ in remaining_steps(folder, name, restarts):
            time.sleep(STEP_S)


@task(max_attempts=1)
def is_long(folder, name, restarts):
    steps_of(folder, name, restarts)


@task(max_attempts=1)
async def is_long_and_async(folder, name, restarts):
    with noted(folder, name):
        for _ in remaining_steps(folder, name, restarts):
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
    """Record that the job began, and return when the pipe is written to."""
    _begins(folder)
    (Path(folder) / "pipe").read_text()


@task(atomic=True)
def runs_long_atomic(folder):
    _begins(folder)
    (Path(folder) / "pipe").read_text()


@task(max_attempts=1, atomic=True, result_ttl=3600)
def writes_atomically(folder, name):
    """Record the run outside of the database, and write to it."""
    _begins_as(folder, name)
    Mark.objects.create(text=name)
    time.sleep(STEP_S)


@task(max_attempts=1, result_ttl=3600)
def writes(folder, name):
    _begins_as(folder, name)
    Mark.objects.create(text=name)
    time.sleep(STEP_S)


@task(max_attempts=1, atomic=True, result_ttl=3600)
def waits_atomically(folder, name):
    """Wait, in a transaction that has written, until the test creates the file `released`."""
    Mark.objects.create(text=name)
    _begins_as(folder, name)
    while not (Path(folder) / "released").exists():
        time.sleep(STEP_S)
        Mark.objects.filter(text=name).exists()


@task(max_attempts=1, atomic=True, result_ttl=3600)
def ends_its_session(folder, name):
    _begins_as(folder, name)
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")


def _begins_as(folder, name):
    with (Path(folder) / "begun").open("a") as file:
        file.write(f"{name}\n")


@task
async def runs_long_async(folder):
    _begins(folder)
    await asyncio.to_thread((Path(folder) / "pipe").read_text)


@task(timeout=3)
def holds_the_gil(folder):
    """Hold the GIL until the process is killed: no other thread of it runs again."""
    with (Path(folder) / "runs").open("a") as file:
        file.write(f"{os.getpid()}\n")
    write_pid(folder)
    hold_gil()


@task
async def blocks_the_loop(folder):
    """Block the event loop, as a function that is no coroutine would."""
    write_pid(folder)
    (Path(folder) / "pipe").read_text()


LONGEST_ALONE_S = 3.0


@task
def dies_with_another_job(folder):
    """End the process once `runs_with_a_dying_job` runs in it, or after a timeout if it runs alone."""
    deaths = Path(folder) / "deaths"
    wait_for(lambda: _count(Path(folder) / "runs") > _count(deaths), LONGEST_ALONE_S)
    with deaths.open("a") as file:
        file.write(f"{os.getpid()}\n")
    os._exit(9)


@task
def runs_with_a_dying_job(folder):
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
    """Block the main thread, which in a server runs the event loop. Its other threads continue."""
    time.sleep(120)


if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGUSR1, block_main_thread)


@task
def counts_logged_queries():
    """Count the statements that this process keeps for `connection.queries`: of this job, and of the worker itself."""
    Mark.objects.count()
    own = sum("mark" in query["sql"] for one in connections.all() for query in one.queries_log)
    wrappers = [one for one in gc.get_objects() if isinstance(one, BaseDatabaseWrapper)]
    return own, sum("faktory" in query["sql"] for one in wrappers for query in list(one.queries_log))
