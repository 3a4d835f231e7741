"""Tasks that note what they do, in histories or files: these keep what a rolled back transaction loses."""

import os
import random
import signal
import time
from pathlib import Path

from django_faktory import task
from tests.faults.client import FAILING
from tests.faults.history import Scribe
from tests.project.models import Effect, Mark
from tests.runtime.processes.tasks import write_pid

_scribes = {}


def scribe():
    """Return the scribe of this process; a forked child creates its own."""
    pid = os.getpid()
    if pid not in _scribes:
        _scribes[pid] = Scribe(os.environ["FAKTORY_FAULTS_FOLDER"], f"w{pid}")
    return _scribes[pid]


@task(takes_context=True)
def step(context, number):
    scribe().note("begin", context.task_result.id, str(os.getpid()))
    time.sleep(random.choice((0.0, 0.0, 0.0, 0.02)))
    scribe().note("end", context.task_result.id, str(os.getpid()))
    if number % FAILING == 0:
        raise ValueError("fails on purpose")


def tries_of(folder):
    """Open the file of tries, whose lines no crash of a process undoes."""
    return (Path(folder) / "tries").open("ab", buffering=0)


@task(takes_context=True, max_attempts=1, result_ttl=3600)
def walks(context, folder, by):
    """Write an effect for each mark. Each try is noted in a file, with the process.

    After two chunks of a run it waits while the file `allowed` names fewer bytes of tries.
    """
    allowed = Path(folder) / "allowed"
    with tries_of(folder) as tries, context.each(Mark.objects.all(), by=by) as marks:
        for place, mark in enumerate(marks):
            while place > 2 * by and tries.tell() > int(allowed.read_bytes()):
                time.sleep(0.005)
            tries.write(b"%-7d %d\n" % (os.getpid(), mark.pk))
            Effect.objects.create(number=mark.pk)


@task(takes_context=True, max_attempts=2, backoff=lambda *_: 0, result_ttl=3600)
def leaves_early(context, by, at, way):
    """Write an effect for each number below 500, and leave the walk behind the number `at`, in its first run."""
    with context.each(range(500), key=int, by=by) as numbers:
        for number in numbers:
            Effect.objects.create(number=number)
            if number == at and context.attempt == 1:
                if way == "return":
                    return
                if way == "error":
                    raise ValueError("fails on purpose")
                break


@task(takes_context=True, max_attempts=1, result_ttl=3600)
def waits_in_a_step(context, folder):
    with context.step("reserve"):
        Mark.objects.create(text="reserved")
    with context.step("charge"):
        Mark.objects.create(text=f"charged by {os.getpid()}")
        write_pid(folder)
        while not (Path(folder) / "go on").exists():
            time.sleep(0.01)
    Mark.objects.create(text=f"sent by {os.getpid()}")


@task(takes_context=True, max_attempts=1, result_ttl=3600)
def dies_in_its_second_step(context, folder, steps):
    """Kill the worker in the second step that a run enters, before its commit."""
    entered = 0
    for number in range(steps):
        with tries_of(folder) as tries, context.step("part", key=number):
            Effect.objects.create(number=number)
            tries.write(b"%d %d\n" % (os.getpid(), number))
            entered += 1
            if entered == 2:
                os.kill(os.getpid(), signal.SIGKILL)


@task(takes_context=True, max_attempts=1, result_ttl=3600)
def dies_in_one_step(context, folder):
    with context.step("first"):
        Effect.objects.create(number=1)
    with tries_of(folder) as tries, context.step("fatal"):
        Effect.objects.create(number=2)
        tries.write(b"%d 2\n" % os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)
