"""Cost of waiting FETCHes for pushes and for each other. Rule: W13."""

import asyncio
import gc
import json
import sys
from contextlib import ExitStack

import pytest

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.payloads import FetchRequest
from django_faktory.server import fetch_index
from django_faktory.server.fetch_index import FetchIndex, WaitingFetch
from django_faktory.server.prefetch_buffer import PrefetchBuffer
from django_faktory.server.waiting_fetches import FetchQueue
from tests.server.raw import RawClient, push, worker
from tests.waiting import wait_until

pytestmark = pytest.mark.once_if_quick

MANY = tuple(f"many-{number:04d}" for number in range(1000))


def waiting(index, *queues):
    """Add a FETCH that was tried once and found no job."""
    waiting_fetch = WaitingFetch(FetchRequest(queues=queues), lambda reply: None)
    index.add(waiting_fetch)
    index.mark_tried(waiting_fetch)
    return waiting_fetch


def calls(work):
    """Return the number of Python and C calls that `work` makes, without calls of the garbage collector."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # its callbacks and finalizers would be counted too
    sys.setprofile(trace)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def push_to(index, queue):
    index.mark_all([queue])
    for waiting_fetch in index.with_longest_waiting(index.next_batch()):
        index.mark_tried(waiting_fetch)


def test_push_cost_does_not_depend_on_fetches_waiting_for_other_queues():
    index = FetchIndex()
    waiting(index, "wanted")
    few = calls(lambda: push_to(index, "wanted"))
    for number in range(500):
        waiting(index, f"other-{number}", *MANY[:90])
    assert calls(lambda: push_to(index, "wanted")) == few


def test_a_push_does_not_try_a_large_fetch_and_a_poll_does():
    index = FetchIndex()
    large = WaitingFetch(FetchRequest(queues=MANY), lambda reply: None)
    index.add(large)
    assert (index.next_poll(), index.next_poll()) == (large, None)
    small = waiting(index, "a", MANY[7], "b")
    index.mark_all([MANY[8], MANY[7]])
    assert (index.next_batch(), index.next_poll()) == ([small], None)
    index.mark_all(None)
    assert (index.next_batch(), index.next_poll()) == ([small], large)


def test_a_claim_has_bounded_queue_names():
    index = FetchIndex()
    for number in range(50):
        waiting(index, *(f"few-{number}-{place}" for place in range(90)))
    index.mark_all(None)
    sizes = []
    while batch := index.next_batch():
        sizes.append(sum(len(waiting_fetch.request.queues) for waiting_fetch in batch))
        for waiting_fetch in batch:
            index.mark_tried(waiting_fetch)
    assert sum(sizes) == 50 * 90
    assert max(sizes) <= fetch_index.NAMES_A_CLAIM
    assert len(sizes) == 5, "FETCHes with few names share claims"


class CommitQueueSpy:
    """Collects what is submitted; `answer` answers the oldest item."""

    def __init__(self):
        self.submitted = []

    def submit(self, request, answer):
        self.submitted.append((request, answer))

    def answer(self, result):
        self.submitted.pop(0)[1](result)


@pytest.mark.parametrize("few", ["few", f"other-{MANY[5]}"])
def test_at_most_one_claim_of_many_names_runs_at_a_time(few):
    """With two, both threads of the commit queue would be busy, and a PUSH would wait for them."""

    async def run():
        spy, loop = CommitQueueSpy(), asyncio.get_running_loop()
        prefetch_buffer = PrefetchBuffer(limit=0, assign_prefetched=None, release=None, loop=loop)
        fetch_queue = FetchQueue(spy, prefetch_buffer, width=2, release=None, poll_s=60.0, loop=loop)
        for queues in (MANY, [f"other-{name}" for name in MANY], [few]):
            fetch_queue.add(WaitingFetch(FetchRequest(queues=tuple(queues)), lambda _: None))
        assert [len(request.queues) for request, _ in spy.submitted] == [len(MANY), 1]
        spy.answer([])
        assert [len(request.queues) for request, _ in spy.submitted] == [1, len(MANY)]
        fetch_queue.stop()

    asyncio.run(run())


def test_each_fetch_waits_its_own_time_and_is_answered_once():
    """W13. The answer to one may bring the next FETCH of its client, while others that are due wait for theirs."""

    async def run():
        spy, loop, answered, is_over = CommitQueueSpy(), asyncio.get_running_loop(), [], asyncio.Event()
        prefetch_buffer = PrefetchBuffer(limit=0, assign_prefetched=None, release=None, loop=loop)
        fetch_queue = FetchQueue(spy, prefetch_buffer, width=2, release=None, poll_s=60.0, loop=loop, wait_s=0.2)

        def fetch(name, *following):
            since = loop.time()

            def answer(result):
                answered.append((name, result, loop.time() - since))
                for next_name in following:
                    fetch(next_name)
                if len(answered) == 3:
                    is_over.set()

            fetch_queue.add(WaitingFetch(FetchRequest(queues=("q",)), answer))
            while spy.submitted:
                spy.answer([])

        fetch("first", "third")
        fetch("second")
        await asyncio.wait_for(is_over.wait(), 20)
        fetch_queue.stop()
        return answered

    answered = asyncio.run(run())
    assert [(name, result) for name, result, _ in answered] == [("first", None), ("second", None), ("third", None)]
    assert all(waited_s >= 0.19 for _, _, waited_s in answered)


def test_a_new_fetch_is_preceded_by_the_longest_waiting_fetch():
    index = FetchIndex()
    elder, other = waiting(index, "old", "b"), waiting(index, "elsewhere")
    newcomer = WaitingFetch(FetchRequest(queues=("new", "b", "old")), lambda reply: None)
    index.add(newcomer)
    assert other not in index.with_longest_waiting(index.next_batch())
    assert index.with_longest_waiting([newcomer]) == [elder, newcomer]


def test_the_index_keeps_nothing_of_removed_fetches():
    index = FetchIndex()
    gone = [waiting(index, *MANY) for _ in range(80)] + [waiting(index, "few")]
    assert list(index._by_queue) == ["few"], "a FETCH with many names is in no queue's index"
    for waiting_fetch in gone:
        index.remove(waiting_fetch)
        index.remove(waiting_fetch)
    assert not any((len(index), index._by_queue, index._untried, index._due_polls))


class Recording(OrmBroker):
    """OrmBroker that records the queue names of each claim."""

    def __init__(self):
        super().__init__("default")
        self.names = []

    def fetch(self, requests):
        self.names.append([request.queues for request in requests])
        return super().fetch(requests)

    def exchange(self, jobs, acks, requests):
        self.names.append([request.queues for request in requests])
        return super().exchange(jobs, acks, requests)

    def take_connection(self):
        return None


@pytest.fixture
def recording(serve, settings):
    settings.FAKTORY = {"POLL_INTERVAL": 600.0, "PREFETCH": 0}
    return serve(Recording())


def test_fetches_with_many_queue_names_do_not_delay_other_clients(recording):
    """Fifty such fetches once delayed every round trip of other clients by 8 s: each push claimed for all of them
    together.
    """
    with ExitStack() as opened:
        clients = [RawClient.identified(recording.address, **worker(f"w{number}")) for number in range(51)]
        for client in clients:
            opened.callback(client.close)
        *many, good = clients
        for client in many:
            client.send(f"FETCH {' '.join(MANY)}")
        for number in range(20):
            assert good.ask(push(jid=f"good-{number:04d}", queue="good")) == b"+OK"
            assert json.loads(good.ask("FETCH good"))["jid"] == f"good-{number:04d}"
        for turn in recording.broker.names:
            assert sum(map(len, turn)) <= len(MANY) + 2, "one large FETCH, and the good client's"


@pytest.mark.tuning(fetch_wait_s=600.0)
def test_a_job_for_a_waiting_large_fetch_is_found_by_the_next_poll(serve, settings):
    settings.FAKTORY = {"POLL_INTERVAL": 0.1}
    server = serve(Recording())
    clients = [RawClient.identified(server.address, **worker(f"w{number}")) for number in range(3)]
    for count, client in enumerate(clients[:2], 1):
        client.send(f"FETCH {' '.join(MANY)}")
        wait_until(lambda count=count: len(server.fetch_queue._waiting) == count)
    for number in range(2):
        assert clients[2].ask(push(jid=f"for-many-{number}", queue=MANY[500])) == b"+OK"
    found = {json.loads(client.reply())["jid"] for client in clients[:2]}
    assert found == {"for-many-0", "for-many-1"}
    for client in clients:
        client.close()


def test_invalid_queue_names_of_a_waiting_fetch_never_reach_a_claim(recording):
    """Names of 15 MiB once blocked claims for 18 s and stayed in memory."""
    clients = [RawClient.identified(recording.address, **worker(f"w{number}")) for number in range(3)]
    for client in clients:
        client.send(f"FETCH {'q' * 300} a/b {'x' * 200_000}")
    wait_until(lambda: len(recording.fetch_queue._waiting) == 3)
    assert [client.reply() for client in clients] == [None] * 3
    assert recording.broker.names == []
    for client in clients:
        client.send(f"FETCH {'q' * 300} good")
    wait_until(lambda: len(recording.fetch_queue._waiting) == 3 and recording.broker.names)
    for client in clients:
        client.close()
    wait_until(lambda: not recording.connection_count)
    index = recording.fetch_queue._waiting
    wait_until(lambda: not any((len(index), index._by_queue, index._untried, index._due_polls)))
    assert {name for turn in recording.broker.names for queues in turn for name in queues} == {"good"}
    prefetch_buffer = recording.prefetch_buffer
    assert not any(
        (
            prefetch_buffer._jobs,
            prefetch_buffer._prefetching,
            prefetch_buffer._claiming,
            prefetch_buffer._low,
            prefetch_buffer._returning,
            recording._by_wid,
        )
    )


def test_pausing_prefetch_for_many_queues_uses_bounded_memory(serve, monkeypatch):
    prefetch_buffer = serve().prefetch_buffer
    monkeypatch.setattr(prefetch_buffer, "_limit", 10)
    prefetch_buffer.release_for_priority(f"q-{number}" for number in range(5000))
    assert len(prefetch_buffer._paused_until) <= 1000
    prefetch_buffer._fetch_rate.expected_fetches = lambda now, queue: 10
    assert [
        prefetch_buffer._prefetch_count(prefetch_buffer._loop.time(), queue) for queue in ("q-0", "q-4999", "another")
    ] == [0, 0, 0]
