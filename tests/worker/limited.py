"""Tasks that run too long or until they are cancelled, one for each way in which they may react."""

import asyncio
import time

from django.db import connection

from django_faktory import task
from tests.project.models import Mark
from tests.worker.blocking import gates


def _spin(name):
    gates[name].begun.release()
    while not gates[name].opened.is_set():
        time.sleep(0.005)


@task(timeout=0.2, max_attempts=2)
def spins(name):
    _spin(name)


@task(max_attempts=1)
def spins_without_timeout(name):
    _spin(name)


@task(timeout=0.2)
def spins_and_catches(name):
    try:
        _spin(name)
    except Exception:  # noqa: BLE001  (what is shown: this does not catch a stop)
        return "caught"


@task(timeout=0.2)
def cleans_up_badly(name):
    try:
        _spin(name)
    finally:
        raise ValueError("of the clean-up")


@task(timeout=0.2, atomic=True)
def spins_atomically(name):
    Mark.objects.create(text=name)
    _spin(name)


@task(timeout=0.2)
def spins_in_the_database(name):
    Mark.objects.create(text=name)
    with connection.cursor():
        _spin(name)


class _SpinsAtItsEnd:
    def __init__(self, name):
        self.name = name

    def __del__(self):
        _spin(self.name)


@task(timeout=0.2)
def is_interrupted_in_a_finalizer(name):
    _SpinsAtItsEnd(name)
    _spin(name)


@task(timeout=0.2)
def sits_in_c(name):
    """Wait for a lock in C, where the interpreter raises no exception."""
    gates[name].begun.release()
    gates[name].opened.wait(60)


@task(timeout=0.2)
async def waits_async(name):
    gates[name].begun.release()
    await asyncio.Event().wait()


@task(timeout=0.2)
async def ignores_its_timeout(name):
    gates[name].begun.release()
    while not gates[name].opened.is_set():
        try:
            await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            continue


@task(timeout=30)
def is_quick():
    return "in time"


@task(timeout=30)
async def is_quick_async():
    return "in time"


@task
def never_ends(name):
    _spin(name)


@task
async def never_ends_async(name):
    gates[name].begun.release()
    await asyncio.Event().wait()


@task(takes_context=True)
def looks_at_its_context(context, name):
    gates[name].begun.release()
    while not context.cancelled:
        time.sleep(0.005)
    return "saw it"


@task(takes_context=True)
def never_looks(context, name):
    _spin(name)
    return "done"


@task(takes_context=True)
def fails_when_cancelled(context, name):
    gates[name].begun.release()
    while not context.cancelled:
        time.sleep(0.005)
    raise ValueError("of giving up")


@task(takes_context=True)
def reports_progress(context, name):
    context.progress(1, 3, "begun")
    _spin(name)
    for done in range(1, 2001):
        context.progress(done, 2000, f"{done} of 2000")


@task(takes_context=True, atomic=True)
def reports_progress_atomically(context, name):
    Mark.objects.create(text=name)
    context.progress(1, 2, "half")
    _spin(name)
    context.progress(2, 2, "2000 of 2000")


@task(takes_context=True)
async def reports_progress_async(context, name):
    context.progress(5, 4)
    gates[name].begun.release()
    while not gates[name].opened.is_set():  # noqa: ASYNC110  (opened by a thread)
        await asyncio.sleep(0.005)
    context.progress(4, 4, "2000 of 2000")
