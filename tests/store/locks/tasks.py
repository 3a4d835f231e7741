"""Tasks that hold locks, and wait until a test releases them."""

import threading
from typing import ClassVar

from django_faktory import task
from tests.runtime.processes.tasks import waits
from tests.waiting import wait_until


class Gate:
    """The point at which a running task waits."""

    gates: ClassVar = {}

    def __init__(self, name, context=None):
        self.opened = threading.Event()
        self.context = context
        Gate.gates[name] = self

    @classmethod
    def wait_for(cls, name):
        """Wait for the gate of a running task, and return it."""
        return wait_until(lambda: cls.gates.get(name))


@task(lock="one at a time")
def held(name):
    assert Gate(name).opened.wait(60)


@task(lock=True, takes_context=True)
def watching(context):
    assert Gate("watching", context).opened.wait(60)


@task(lock=lambda shop_id, page=0: f"shop {shop_id}" if shop_id else None)
def by_shop(shop_id, page=0):
    return page


@task(lock="meeting", takes_context=True)
def waits_with_lock(context, folder):
    """Write the pid, wait for the test, and return whether the lock was lost."""
    waits.func(folder)
    return context.lock_lost
