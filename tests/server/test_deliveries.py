"""Jobs that a server claimed for its clients are leased until the server confirms their delivery.

Rules: W14, W19, W20.
"""

import json
from datetime import timedelta

import pytest
from django.test import override_settings

from django_faktory.brokers.orm import OrmBroker
from django_faktory.models import Job, JobLock
from tests.server.raw import RawClient, push, worker
from tests.waiting import wait_until

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]


class Confirming(OrmBroker):
    """OrmBroker that records the jids of each `confirm` call."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.confirmed = []

    def confirm(self, handed):
        self.confirmed.append([one.job.jid for one in handed])
        return super().confirm(handed)


soon = pytest.mark.tuning(confirm_claimed_s=0.3)
late = pytest.mark.tuning(confirm_claimed_s=600.0)


def fetched(client):
    return json.loads(client.ask("FETCH default"))["jid"]


def is_confirmed(jid):
    return Job.objects.filter(jid=jid, state="working", claim__gt=0).exists()


def lasts(row, seconds):
    """Return True if the reservation lasts `seconds`, within 2 ms: SQLite stores milliseconds only."""
    return abs(row.reserved_until - row.started_at - timedelta(seconds=seconds)) < timedelta(milliseconds=2)


@soon
@pytest.mark.parametrize("hello", [worker(), {}], ids=["a worker", "a client without wid"])
def test_a_long_job_is_confirmed_and_gets_its_full_reservation(connect, hello):
    client = connect(**hello)
    client.ask(push(jid="runs-long", reserve_for=600))
    assert fetched(client) == "runs-long"
    row = Job.objects.get()
    assert row.claim < 0  # delivered, not confirmed yet
    assert lasts(row, 60)  # the lease, and not the job's `reserve_for`
    wait_until(lambda: is_confirmed("runs-long"))
    row.refresh_from_db()
    assert lasts(row, 600)
    assert client.ask('ACK {"jid":"runs-long"}') == b"+OK"
    assert not Job.objects.exists()


def test_short_jobs_are_acknowledged_without_a_confirmation(serve):
    broker = Confirming("default")
    client = RawClient.identified(serve(broker).address, **worker())
    try:
        for number in range(20):
            client.ask(push(jid=f"quick-{number:03d}"))
            assert client.ask(f'ACK {{"jid":"{fetched(client)}"}}') == b"+OK"
    finally:
        client.close()
    assert broker.confirmed == []


@soon
def test_many_deliveries_are_confirmed_in_few_calls(serve):
    broker = Confirming("default")
    client = RawClient.identified(serve(broker).address, **worker())
    try:
        client.ask("PUSHB " + json.dumps([{"jid": f"long-{n:04d}", "jobtype": "noop", "args": []} for n in range(30)]))
        jids = {fetched(client) for _ in range(30)}
        wait_until(lambda: not Job.objects.filter(claim__lt=0).exists())
    finally:
        client.close()
    assert set().union(*broker.confirmed) == jids
    assert len(broker.confirmed) < 10


@late
def test_a_stopping_server_confirms_its_deliveries(serve):
    server = serve()
    client = RawClient.identified(server.address, **worker())
    try:
        client.ask(push(jid="still-runs"))
        assert fetched(client) == "still-runs"
        server.stop()
        wait_until(lambda: is_confirmed("still-runs"))
    finally:
        client.close()


@late
def test_the_row_decides_which_worker_may_acknowledge_a_job(connect, server):
    """The row decides, because the delivering node may not know that another node has given the job
    to another worker.
    """
    first, second = connect(**worker("wid-1")), connect(**worker("wid-2"))
    first.ask(push(jid="moves-on"))
    assert fetched(first) == "moves-on"
    Job.objects.update(wid="wid-2", attempt=2)
    assert second.ask('ACK {"jid":"moves-on"}') == b"+OK"
    assert not Job.objects.exists()


@soon
@pytest.mark.parametrize("keeps", [False, True])
def test_a_beat_extends_reservations_only_if_beat_keeps_jobs_is_set(connect, keeps):
    client = connect(**worker())
    client.ask(push(jid="runs-long", reserve_for=600))
    fetched(client)
    wait_until(lambda: is_confirmed("runs-long"))
    row = Job.objects.get()
    almost_over = row.started_at + timedelta(seconds=5)
    Job.objects.update(reserved_until=almost_over)
    with override_settings(FAKTORY={"BEAT_KEEPS_JOBS": keeps}):
        assert client.ask('BEAT {"wid":"wid-1"}') == b"+OK"
    row.refresh_from_db()
    assert (row.reserved_until > almost_over) is keeps


def test_a_lock_lasts_at_least_as_long_as_the_worker_timeout(connect):
    """A client may be silent for WORKER_TIMEOUT, so the lock has to last at least that long."""
    client = connect(**worker())
    client.ask(push(jid="has-a-lock", custom={"lock": "key"}))
    fetched(client)
    lock = JobLock.objects.get()
    assert lock.expires_at - lock.acquired_at >= timedelta(seconds=60)
