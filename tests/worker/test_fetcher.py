"""How many jobs a worker fetches while its reports fetch jobs too."""

import threading

import pytest

from django_faktory.core.payloads import Ack, Reservation
from django_faktory.store.notifier import PollingListener
from django_faktory.worker.fetcher import Fetcher
from django_faktory.worker.job_buffer import JobBuffer
from django_faktory.worker.queue_order import QueueOrder
from tests.waiting import LONGEST_WAIT_S

pytestmark = pytest.mark.core


class Endless:
    """A broker with any number of jobs. A fetch that goes with an ACK takes until `may_end` is set."""

    blocking = False
    supports_lock_handoff = True

    def __init__(self):
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.delivered = 0

    def fetch(self, requests):
        return [self._deliver(request.count) for request in requests]

    def ack_and_fetch(self, acks, request):
        self.has_begun.set()
        assert self.may_end.wait(LONGEST_WAIT_S)
        return [True] * len(acks), self._deliver(request.count)

    def _deliver(self, count):
        first, self.delivered = self.delivered, self.delivered + count
        return [reservation(number) for number in range(first, first + count)]


def reservation(number, **lock):
    return Reservation(jid=f"job-{number:05}", queue="default", text="{}", wid="w1", attempt=1, **lock)


def test_a_fetch_and_an_acknowledgement_do_not_fill_the_same_room():
    broker, buffer = Endless(), JobBuffer(concurrency=5, max_prefetch=0)
    fetcher = Fetcher(
        broker, buffer, wid="w1", order=QueueOrder(["default"]), listen=PollingListener, poll_interval_s=1.0,
        may_fetch=lambda: True, on_drained=None,
    )  # fmt: skip
    acks = []
    for token in (1, 2):
        job = reservation(90_000 + token, lock_token=token)
        buffer.add([job])
        buffer.take_next()
        acks.append(Ack(jid=job.jid, wid="w1", attempt=1))
        buffer.finish(job, acks[-1], ran_s=5.0)
    room = buffer.wait_for_room(0)
    reporting = threading.Thread(target=fetcher.acknowledge, args=(acks,))
    fetching = threading.Thread(target=fetcher._run_round, args=(PollingListener(),))
    reporting.start()
    assert broker.has_begun.wait(LONGEST_WAIT_S)
    fetching.start()
    # The round reads the room before it waits for the fetch of the other thread, or after it: both must be right.
    fetching.join(0.05)
    broker.may_end.set()
    reporting.join()
    fetching.join()
    assert buffer.count_by_queue().total() == room
