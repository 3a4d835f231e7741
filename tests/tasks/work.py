"""A worker as a function: fetches, runs and reports one job in the calling thread."""

import asyncio

from django_faktory.brokers import get_broker
from django_faktory.core.payloads import Ack, FetchRequest, Interruption
from django_faktory.core.steps import Parking
from django_faktory.worker.execution import prepare

QUEUES = ("default", "mail", "low")


def fetched(wid="w1"):
    [[reservation]] = get_broker().fetch([FetchRequest(queues=QUEUES, wid=wid)])
    return reservation


def work(wid="w1"):
    """Run one job and return the report that was sent; None if the task itself reported to the broker."""
    found = prepare(fetched(wid))
    if hasattr(found, "run"):
        found = asyncio.run(found.arun(get_broker())) if found.is_async else found.run(get_broker())
    if found is None:
        return None
    broker = get_broker()
    report = {Ack: broker.ack, Interruption: broker.interrupt, Parking: broker.interrupt}.get(type(found), broker.fail)
    assert report([found]) == [True]
    return found
