"""Check that the memory, descriptors and threads of a busy node do not grow.

`FAKTORY_SOAK_MINUTES=60` runs it for an hour.
"""

import itertools
import json
import os
import statistics
import time

import psutil
import pytest

from django_faktory.models import Job
from tests.project import tasks
from tests.server.raw import RawClient, push, worker
from tests.waiting import wait_until

MINUTES = float(os.environ.get("FAKTORY_SOAK_MINUTES", "0"))
ROUNDS = 30
"""Minimum number of rounds, also for a run of 0 minutes."""

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.timeout(600 + 120 * MINUTES)]

MB = 2**20
SLOPE_MB = 1.0
"""Growth in ten minutes that counts as a leak in a run of an hour. A short run only shows a leak in each round."""

SHORT_MB = 6.0
A_ROUND = 20


def one_round(number, address):
    """Run jobs that end in each way, and clients that connect, work and leave, one of them without END."""
    ours = [
        *tasks.noop.enqueue_many([()] * A_ROUND),
        *tasks.async_add.enqueue_many([(1, 2)] * A_ROUND),
        tasks.flaky.enqueue(1),
        tasks.fails_for_good.enqueue(),
        tasks.writes_mark_atomically.enqueue(f"round {number}"),
    ]
    jid, queue = f"theirs-{number:06d}", f"theirs-{number % 7}"
    producer = RawClient.identified(address)
    assert producer.ask(push(jid=jid, queue=queue)) == b"+OK"
    consumer = RawClient.identified(address, **worker(f"theirs-{number}"))
    assert json.loads(consumer.ask(f"FETCH {queue}"))["jid"] == jid
    assert consumer.ask(f'ACK {{"jid":"{jid}"}}') == b"+OK"
    assert producer.ask("nonsense").startswith(b"-ERR")
    consumer.send("FETCH nothing")  # the client closes before the reply
    for client in (producer, consumer):
        client.close()
    jids = [result.id for result in ours]
    wait_until(lambda: Job.objects.filter(jid__in=jids, finished_at=None).count() == 0, 60)
    Job.objects.filter(jid__in=jids).delete()


def reading(processes):
    """Return the memory in MB, the open files and the threads of each process."""
    return {
        process.pid: (process.memory_info().rss / MB, process.num_fds(), process.num_threads()) for process in processes
    }


def test_memory_descriptors_and_threads_do_not_grow_under_load(runfaktory, address):
    program = runfaktory("127.0.0.1:0", "--processes", "1", "--concurrency", "2")
    at = address(program)
    program.wait_for_log("worker started")
    nodes = [psutil.Process(program.pid), *program.children()]
    begun, readings = time.monotonic(), []
    for number in itertools.count():
        one_round(number, at)
        readings.append((time.monotonic() - begun, reading(nodes)))
        if number + 1 >= ROUNDS and time.monotonic() - begun >= MINUTES * 60:
            break
    settled = readings[len(readings) // 3 :]
    for process in nodes:
        mine = [(moment, *found[process.pid]) for moment, found in settled]
        role = " ".join(process.cmdline()[-6:])
        assert_flat([fds for _, _, fds, _ in mine], f"descriptors of {role}")
        assert_flat([threads for *_, threads in mine], f"threads of {role}")
        memory = [(moment, rss) for moment, rss, *_ in mine]
        if MINUTES >= 10:
            slope = statistics.linear_regression(*zip(*memory, strict=True)).slope * 600
            assert slope < SLOPE_MB, f"memory of {role}: {slope:.2f} MB more in ten minutes; {memory[::20]}"
        else:
            assert memory[-1][1] - memory[0][1] < SHORT_MB, f"memory of {role}: {memory}"


def assert_flat(counts, what):
    """Allow a temporary increase by one: only a lasting increase fails."""
    half = len(counts) // 2
    assert min(counts[half:]) <= min(counts[:half]) + 1, f"{what}: {counts}"
