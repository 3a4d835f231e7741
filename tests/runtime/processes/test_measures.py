"""Metrics of real processes: the sums that runfaktory adds in the database, and the lines that it sends to statsd."""

import json
import signal
import socket

import pytest

from django_faktory.models import AlarmRecord, Queue
from django_faktory.store.statistics import histograms
from tests.project.tasks import add, fails_for_good
from tests.runtime.processes.test_runfaktory import ANY_PORT, WORKER, reaches
from tests.server.raw import RawClient
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True), pytest.mark.once]


def ended(task):
    sums = histograms.read_totals(using="default").get(("default", task.jobtype))
    return (sums.started, sums.succeeded, sums.failed) if sums else None


def test_a_worker_writes_its_statistics_when_it_stops(runfaktory):
    results = [add.enqueue(2, 3), fails_for_good.enqueue()]
    program = runfaktory(*WORKER)
    reaches(results[0], "succeeded")
    reaches(results[1], "dead")
    program.signal(signal.SIGTERM)
    assert program.code() == 0
    assert (ended(add), ended(fails_for_good)) == ((1, 1, 0), (1, 0, 1))


def test_a_server_records_statistics_of_workers_in_any_language(runfaktory, address):
    add.enqueue(2, 3)
    program = runfaktory(ANY_PORT, "--server-only")
    client = RawClient.identified(address(program), wid="another-worker")
    jid = json.loads(client.ask("FETCH default"))["jid"]
    assert client.ask(f'ACK {{"jid":"{jid}"}}') == b"+OK"
    client.close()
    program.signal(signal.SIGTERM)
    assert program.code() == 0
    assert ended(add) == (1, 1, 0)


ROLES = pytest.mark.parametrize("role", [(ANY_PORT, "--processes", "1"), WORKER], ids=["server", "worker-only"])


@ROLES
def test_alarms_are_read_for_messages(runfaktory, role):
    runfaktory(*role, ALARM_EMAILS=["on-call@example.org"])
    wait_until(AlarmRecord.objects.exists)


@ROLES
def test_statsd_receives_job_counts_and_queue_sizes(runfaktory, role):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as statsd:
        statsd.bind(("127.0.0.1", 0))
        statsd.settimeout(60)
        Queue.objects.get_or_create(name="default")  # a push of this process may remember it from another test
        result = add.enqueue(2, 3)
        runfaktory(*role, STATSD=f"127.0.0.1:{statsd.getsockname()[1]}")
        reaches(result, "succeeded")
        received = []
        wanted = ("faktory.jobs.count:1|c|#queue:default", "faktory.queue.size:")
        while not all(any(line.startswith(begin) for line in received) for begin in wanted):
            try:
                received += statsd.recv(65536).decode().split("\n")
            except TimeoutError:
                pytest.fail(f"expected lines that begin with {wanted}, got {received}")
