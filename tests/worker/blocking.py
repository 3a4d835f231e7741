"""Tasks that run until the test releases them, and brokers that the test can make unavailable."""

import asyncio
import threading
import time
from collections import defaultdict

from django_faktory import task
from django_faktory.brokers.base import Broker
from django_faktory.brokers.orm import OrmBroker
from django_faktory.errors import BrokerUnavailable
from tests.project.models import Mark


class Gate:
    """A task releases `begun` when it starts, and continues when the test sets `opened`."""

    def __init__(self):
        self.begun = threading.Semaphore(0)
        self.opened = threading.Event()


gates = defaultdict(Gate)


@task
def passes(name):
    gates[name].begun.release()
    assert gates[name].opened.wait(60)
    return name


@task
async def passes_async(name):
    gates[name].begun.release()
    while not gates[name].opened.is_set():  # noqa: ASYNC110  (opened by a thread)
        await asyncio.sleep(0.005)
    return name


@task
async def ignores_cancellation(name):
    gates[name].begun.release()
    while not gates[name].opened.is_set():
        try:
            await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            continue


@task
async def cancels_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(1)


left = []
"""Names of tasks that were left, whether they ended or were interrupted."""


@task
def sleeps(name):
    """Wait in Python, so that it can be interrupted."""
    try:
        gates[name].begun.release()
        while not gates[name].opened.is_set():
            time.sleep(0.005)
    finally:
        left.append(name)
    return name


@task(atomic=True)
def writes_and_sleeps(name):
    Mark.objects.create(text=name)
    gates[name].begun.release()
    while not gates[name].opened.is_set():
        time.sleep(0.005)


@task
def enqueues(name, times):
    """Wait for the gate, then enqueue the same task, `times` times in a chain."""
    gates[name].begun.release()
    assert gates[name].opened.wait(60)
    if times:
        enqueues.enqueue(name, times - 1)


class Unreliable(OrmBroker):
    """A broker on the database; each verb named in `unavailable` raises BrokerUnavailable."""

    def __init__(self):
        super().__init__("default")
        self.unavailable = set()
        self.tried = []

    def _record_call(self, verb):
        self.tried.append(verb)
        if verb in self.unavailable:
            raise BrokerUnavailable("switched off by the test")

    def hello(self, worker):
        self._record_call("hello")
        super().hello(worker)

    def fetch(self, requests):
        self._record_call("fetch")
        return super().fetch(requests)

    def ack(self, acks):
        self._record_call("ack")
        return super().ack(acks)

    def fail(self, failures):
        self._record_call("fail")
        return super().fail(failures)

    def interrupt(self, interruptions):
        self._record_call("interrupt")
        return super().interrupt(interruptions)

    def release(self, reservations):
        self._record_call("release")
        return super().release(reservations)

    def beat(self, beats):
        self._record_call("beat")
        return super().beat(beats)

    def bye(self, wids):
        self._record_call("bye")
        super().bye(wids)


class BrokerWithoutInterrupt(OrmBroker):
    """A broker with the base class's `interrupt`, as remote servers have."""

    supports_interrupt = False
    interrupt = Broker.interrupt
