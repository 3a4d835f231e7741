"""Prefetch: jobs reserved before a worker requests them, if the database can do so. Rules: W13, W19; ADR 0017, 0026."""

import threading
from datetime import timedelta

import pytest
from django.db import connection, transaction

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.payloads import Ack, Delivery, FetchRequest
from django_faktory.models import Job, WorkerProcess
from django_faktory.store.jobs import failures
from django_faktory.store.jobs.releases import release_claims
from django_faktory.store.store import Store
from tests.factories import T0, JobFactory, WorkerFactory
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def broker():
    broker = OrmBroker("default", announce=lambda *_: None)
    broker.clock = lambda: T0
    return broker


@pytest.fixture
def postgresql():
    if connection.vendor != "postgresql":
        pytest.skip("about PostgreSQL")


def stored(*jids, **fields):
    for place, jid in enumerate(jids):
        JobFactory(jid=jid, enqueued_at=T0 + timedelta(microseconds=place - 1000), **fields)


def asking(prefetch, *, count=1, wid="w1", queue="default"):
    return FetchRequest(queues=(queue,), wid=wid, count=count, prefetch=prefetch, candidate_wids=(wid,))


def read(broker, *requests, acks=()):
    """Return the jobs of each request, as "jid", or "jid*" if prefetched."""
    fetched = broker.exchange([], list(acks), list(requests)).fetched
    return [" ".join(job.jid + "*" * job.is_prefetched for job in jobs) for jobs in fetched]


def test_jobs_are_prefetched_only_if_the_database_supports_it(broker):
    """Other databases ignore the request to prefetch, and nothing else changes."""
    stored("a", "b", "c", "d")
    reads = broker.supports_prefetch
    assert reads is (connection.vendor == "postgresql")
    assert read(broker, asking(2)) == ["a b* c*" if reads else "a"]
    assert Job.objects.filter(state="working").count() == (3 if reads else 1)


def test_jobs_are_prefetched_for_a_request_with_count_zero(broker, postgresql):
    stored("a", "b", "c")
    assert read(broker, asking(2, count=0)) == ["a* b*"]


def test_a_job_is_prefetched_only_if_it_expires_after_the_lease(broker, postgresql):
    stored("a", expires_at=T0 + timedelta(seconds=61))
    stored("b", expires_at=T0 + timedelta(seconds=59), queue="other")
    assert read(broker, asking(2, count=0), asking(2, queue="other", count=0)) == ["a*", ""]


def test_an_exchange_combines_prefetches_with_fetches_and_acks(broker, postgresql):
    stored("a", "b", "c")
    stored("d", "e", queue="other")
    JobFactory(jid="done-now", working=True)
    requests = [asking(2, count=0), asking(0, queue="other", wid="w2"), asking(1, queue="other", count=0)]
    assert read(broker, *requests, acks=[Ack(jid="done-now", wid="w1")]) == ["a* b*", "d", "e*"]
    assert not Job.objects.filter(jid="done-now").exists()


def test_a_prefetched_job_has_no_worker_until_it_is_confirmed(broker, postgresql):
    stored("a")
    read(broker, asking(1, count=0))
    one = Job.objects.get()
    assert (one.state, one.wid, one.claims) == ("working", "", 1)
    assert one.claim < 0
    assert one.reserved_until == T0 + timedelta(seconds=60)


@pytest.mark.parametrize("state", ["quiet", "terminate"])
def test_nothing_is_prefetched_if_a_candidate_worker_is_quiet_or_terminating(broker, postgresql, state):
    stored("a", "b")
    WorkerFactory(wid="w2", state=state)
    request = FetchRequest(queues=("default",), wid="w1", prefetch=1, candidate_wids=("w1", "w2"))
    assert read(broker, request) == ["a"]
    WorkerProcess.objects.update(state="running")
    assert read(broker, request) == ["b"]


def test_prefetched_jobs_of_a_crashed_server_are_released_without_using_a_retry(broker, postgresql):
    stored("a", "b", retry=0)
    read(broker, asking(1))
    later = T0 + timedelta(seconds=61)
    assert failures.reap(Store(now=later)) == 1
    one = Job.objects.get(jid="b")
    assert (one.state, one.wid, one.failures, one.reserved_until) == ("enqueued", "", 0, None)
    assert one.enqueued_at == T0 - timedelta(microseconds=999)
    assert Job.objects.get(jid="a").state == "working"


def test_reaping_retries_an_expired_reservation_and_requeues_a_prefetched_job(broker, postgresql):
    stored("a", "b", reserve_for=60)
    read(broker, asking(1))
    assert failures.reap(Store(now=T0 + timedelta(seconds=61))) == 2
    assert dict(Job.objects.values_list("jid", "state")) == {"a": "retries", "b": "enqueued"}


def test_a_released_prefetched_job_can_be_claimed_by_a_worker(broker, postgresql):
    stored("a")
    read(broker, asking(1, count=0))
    failures.reap(Store(now=T0 + timedelta(seconds=61)))
    assert read(broker, asking(0)) == ["a"]
    assert Job.objects.get().claim > 0


def test_releasing_an_unanswered_claim_also_releases_its_prefetched_jobs(broker, postgresql):
    stored("a", "b")
    read(broker, asking(1))
    number = Job.objects.get(jid="a").claim
    assert release_claims(Store(), [number]) == 2
    assert set(Job.objects.values_list("state", flat=True)) == {"enqueued"}


@pytest.mark.parametrize("is_confirmed", [False, True])
def test_a_prefetched_job_can_be_released_before_and_after_confirmation(broker, postgresql, is_confirmed):
    stored("a", "b")
    [[a, b]] = broker.exchange([], [], [asking(2, count=0)]).fetched
    handed = broker.assign_prefetched(b, "w1")
    assert handed.wid == "w1"
    assert broker.release([a]) == 1
    if is_confirmed:
        broker.confirm([Delivery(handed, 0.5)])
        assert Job.objects.get(jid="b").started_at == T0 - timedelta(seconds=0.5)
    assert broker.release([handed]) == 1
    assert set(Job.objects.values_list("state", "wid")) == {("enqueued", "")}


def test_an_ack_concurrent_with_the_confirmation_ends_the_job(broker, postgresql):
    """W16: the ack first saw an empty wid, and finds its own after the wait."""
    stored("a")
    [[a]] = broker.exchange([], [], [asking(1, count=0)]).fetched
    acked = []

    def ack():
        try:
            acked.extend(OrmBroker("default").ack([Ack(jid="a", wid="w1")]))
        finally:
            connection.close()

    other = threading.Thread(target=ack)
    with transaction.atomic():
        broker.confirm([Delivery(broker.assign_prefetched(a, "w1"), 0.0)])
        other.start()
        wait_until(is_a_session_waiting)
    other.join(30)
    assert acked == [True]
    assert not Job.objects.exists()


def test_confirmation_skips_a_locked_job_without_waiting_and_confirms_it_later(broker, postgresql):
    stored("a", "b", "c")
    [found] = broker.exchange([], [], [asking(3, count=0)]).fetched
    handed = [Delivery(broker.assign_prefetched(job, "w1"), 0.0) for job in found]
    other = connection.copy()
    try:
        with transaction.atomic():
            Job.objects.select_for_update().get(jid="a")
            with other.cursor() as cursor:  # c ends meanwhile
                cursor.execute("DELETE FROM django_faktory_job WHERE jid = 'c'")
            assert confirmed_elsewhere(handed) == {"a"}
            assert dict(Job.objects.values_list("jid", "wid")) == {"a": "", "b": "w1"}
    finally:
        other.close()
    assert broker.confirm(handed) == set()
    assert dict(Job.objects.values_list("jid", "wid")) == {"a": "w1", "b": "w1"}


def confirmed_elsewhere(handed):
    """Return the jobs that are not confirmed when another session confirms."""
    unconfirmed = []

    def confirm():
        try:
            unconfirmed.append(OrmBroker("default").confirm(handed))
        finally:
            connection.close()

    other = threading.Thread(target=confirm)
    other.start()
    other.join(30)
    assert unconfirmed, "it waits"
    return unconfirmed[0]


def is_a_session_waiting():
    """Return whether a session waits for the end of this session's transaction."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT COUNT(*) FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))"
        )
        return cursor.fetchone()[0]
