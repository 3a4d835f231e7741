"""Lease of a claim: it lasts until the worker falls silent, or until the delivery is confirmed. Rules: W19, W20."""

import threading
from datetime import timedelta

import pytest
from django.db import connection, transaction

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.payloads import Ack, Beat, Delivery, FetchRequest, Lease, Reservation
from django_faktory.models import Job, JobLock, Limiter, WorkerProcess
from django_faktory.runtime.maintenance import Maintenance
from django_faktory.store.jobs import failures
from django_faktory.store.store import Store
from tests.factories import T0, JobFactory, WorkerFactory, payload
from tests.store.limits.conftest import limit

pytestmark = pytest.mark.django_db(transaction=True)

DELIVERY_S, TIMEOUT_S = 20, 60


class Clock:
    """The clock of a broker, moved by the test."""

    now = T0

    def moves(self, seconds):
        self.now = T0 + timedelta(seconds=seconds)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def broker(clock):
    broker = OrmBroker("default", announce=lambda *_: None, worker_timeout_s=TIMEOUT_S, delivery_lease_s=DELIVERY_S)
    broker.clock = lambda: clock.now
    return broker


def at(seconds):
    return T0 + timedelta(seconds=seconds)


def claimed(broker, lease, *jobs, wid="w1", count=1):
    """Push these jobs and claim some of them."""
    assert not any(broker.push(jobs or [payload("a")]))
    [found] = broker.fetch([FetchRequest(queues=("default",), wid=wid, count=count, lease=lease)])
    return found


def reserved(**fields):
    return Job.objects.get(**fields).reserved_until


class TestHeartbeat:
    def test_a_claim_lasts_at_least_twice_the_worker_timeout(self, broker):
        claimed(broker, Lease.HEARTBEAT, payload("a", reserve_for=1), payload("b", reserve_for=600), count=2)
        ends = Job.objects.order_by("reserve_for").values_list("reserved_until", flat=True)
        assert list(ends) == [at(2 * TIMEOUT_S), at(600)]

    def test_a_beat_extends_a_reservation_that_is_half_over(self, broker, clock):
        WorkerFactory(wid="w1")
        [job] = claimed(broker, Lease.HEARTBEAT, payload("a", reserve_for=600))
        clock.moves(299)
        broker.beat([Beat(wid="w1", held=((job.jid, job.attempt),))])
        assert reserved() == at(600), "a short job costs no write"
        clock.moves(301)
        broker.beat([Beat(wid="w1", held=((job.jid, job.attempt),))])
        assert reserved() == at(301 + 600)

    @pytest.mark.parametrize(
        "held",
        [(), (("job-b...", 1),), (("job-a...", 2),), (("job-a...", 0), ("no\x00ne", 1))],
        ids=["nothing", "another job", "a later attempt", "an earlier attempt"],
    )
    def test_a_job_that_the_beat_does_not_name_is_not_extended(self, broker, clock, held):
        WorkerFactory(wid="w1")
        claimed(broker, Lease.HEARTBEAT)
        clock.moves(1700)
        broker.beat([Beat(wid="w1", held=held)])
        assert reserved() == at(1800)

    def test_the_jobs_of_another_worker_are_not_extended(self, broker, clock):
        WorkerFactory(wid="w1"), WorkerFactory(wid="w2")
        [job] = claimed(broker, Lease.HEARTBEAT)
        clock.moves(1700)
        broker.beat([Beat(wid="w2", held=((job.jid, job.attempt),))])
        assert reserved() == at(1800)

    def test_a_beat_of_an_unregistered_worker_extends_no_reservation(self, broker, clock):
        [job] = claimed(broker, Lease.HEARTBEAT)
        clock.moves(1700)
        broker.beat([Beat(wid="w1", held=((job.jid, job.attempt),))])
        assert reserved() == at(1800)

    def test_a_beat_extends_all_jobs_that_it_names(self, broker, clock):
        WorkerFactory(wid="w1")
        jobs = claimed(broker, Lease.HEARTBEAT, *map(payload, range(20)), count=20)
        held = tuple((job.jid, job.attempt) for job in jobs)
        clock.moves(1000)
        broker.beat([Beat(wid="w1", held=held)])
        assert set(Job.objects.values_list("reserved_until", flat=True)) == {at(2800)}

    def test_a_beat_extends_more_jobs_than_fit_into_one_statement(self, broker, clock):
        WorkerFactory(wid="w1")
        Job.objects.bulk_create(JobFactory.many(1200, working=True), batch_size=1000)
        clock.moves(1000)
        broker.beat([Beat(wid="w1", held=tuple((jid, 1) for jid in Job.objects.values_list("jid", flat=True)))])
        assert set(Job.objects.values_list("reserved_until", flat=True)) == {at(2800)}

    def test_a_beat_skips_a_job_locked_by_a_transaction_without_waiting(self, broker, clock):
        """A task may change its own job in a long transaction."""
        if connection.vendor == "sqlite":
            pytest.skip("one writer at a time")
        WorkerFactory(wid="w1")
        jobs = claimed(broker, Lease.HEARTBEAT, payload("a"), payload("b"), count=2)
        clock.moves(1000)
        beaten = threading.Event()

        def beat():
            broker.beat([Beat(wid="w1", held=tuple((job.jid, job.attempt) for job in jobs))])
            broker.close()
            beaten.set()

        with transaction.atomic():
            Job.objects.filter(jid=jobs[0].jid).update(backtrace=1)
            other = threading.Thread(target=beat)
            other.start()
            assert beaten.wait(30)
        other.join()
        assert [reserved(jid=job.jid) for job in jobs] == [at(1800), at(2800)]


class TestReaping:
    """After an outage no lease could be extended: a node listens for beats before it reaps (ADR 0017)."""

    def test_a_new_node_does_not_reap_jobs_that_a_heartbeat_may_extend(self):
        WorkerFactory(wid="beats", beat_at=T0)
        WorkerFactory(wid="never-beat", beat_at=None)
        over = {"working": True, "reserved_until": T0}
        for wid in ("beats", "never-beat", "unknown", ""):
            JobFactory(jid=f"of-{wid}", wid=wid, **over)
        JobFactory(jid="not-delivered", wid="", claim=-7, **over)
        assert failures.reap(Store(now=at(1)), skip_extendable=True) == 3
        left = Job.objects.filter(state="working").values_list("jid", flat=True)
        assert set(left) == {"of-beats", "not-delivered"}
        assert failures.reap(Store(now=at(1))) == 2

    def test_maintenance_listens_for_beats_before_it_reaps(self):
        JobFactory(working=True, reserved_until=T0)
        WorkerProcess.objects.update_or_create(wid="w1", defaults={"beat_at": T0})
        loop = Maintenance("default")
        loop._reap_reservations()
        assert Job.objects.get().state == "working"
        loop.run_once()
        assert Job.objects.get().state != "working"


class TestDelivery:
    def test_a_claim_for_a_client_is_leased_until_its_delivery_is_confirmed(self, broker, clock):
        [job] = claimed(broker, Lease.DELIVERY, payload("a", reserve_for=600))
        row = Job.objects.get()
        assert (row.wid, row.reserved_until) == ("w1", at(DELIVERY_S))
        assert row.claim < 0
        assert broker.confirm([Delivery(job, 3.0)]) == set()
        row.refresh_from_db()
        assert row.claim > 0
        assert (row.state, row.wid, row.claims) == ("working", "w1", 1)
        assert abs(row.reserved_until - at(600)) <= timedelta(seconds=3)

    def test_a_reservation_shorter_than_the_delivery_lease_is_not_extended(self, broker):
        claimed(broker, Lease.DELIVERY, payload("a", reserve_for=5))
        assert reserved() == at(5)

    @pytest.mark.parametrize("wid", ["w1", ""])
    def test_an_undelivered_job_is_released_without_using_a_retry(self, broker, clock, wid):
        assert not any(broker.push([payload("a", retry=0)]))
        age = Job.objects.get().enqueued_at
        [job] = claimed(broker, Lease.DELIVERY, payload("b"), wid=wid)
        assert failures.reap(Store(now=at(DELIVERY_S - 1))) == 0
        assert failures.reap(Store(now=at(DELIVERY_S + 1))) == 1
        row = Job.objects.get(jid=job.jid)
        assert (row.state, row.wid, row.failures, row.losses, row.reserved_until) == ("enqueued", "", 0, 0, None)
        assert row.enqueued_at == age
        assert broker.ack([Ack(jid=job.jid, wid=wid)]) == [False]

    def test_an_undelivered_job_releases_its_lock_and_its_permits(self, broker, clock):
        limit("queue", "default", 1)
        claimed(broker, Lease.DELIVERY, payload("a", custom={"lock": "key"}))
        assert Job.objects.get().permits
        assert failures.reap(Store(now=at(DELIVERY_S + 1))) == 1
        assert not JobLock.objects.exists()
        assert not Limiter.objects.exclude(in_use=0).exists()
        assert Job.objects.get().state == "enqueued"

    def test_a_late_confirmation_is_accepted_if_no_other_worker_has_the_job(self, broker, clock):
        [job] = claimed(broker, Lease.DELIVERY)
        clock.moves(DELIVERY_S + 5)
        broker.confirm([Delivery(job, DELIVERY_S + 5.0)])
        assert failures.reap(Store(now=clock.now)) == 0
        assert broker.ack([Ack(jid=job.jid, wid="w1")]) == [True]

    def test_a_late_confirmation_is_ignored_if_another_worker_has_the_job(self, broker, clock):
        [job] = claimed(broker, Lease.DELIVERY)
        clock.moves(DELIVERY_S + 5)
        failures.reap(Store(now=clock.now))
        claimed(broker, Lease.DELIVERY, payload("other", at=at(9000)), wid="w2")
        broker.confirm([Delivery(job, DELIVERY_S + 5.0)])
        row = Job.objects.get(jid=job.jid)
        assert (row.wid, row.claims, row.reserved_until) == ("w2", 2, at(2 * DELIVERY_S + 5))
        assert row.claim < 0

    def test_confirming_a_finished_job_does_not_revive_it(self, broker):
        jobs = claimed(broker, Lease.DELIVERY, payload("a"), payload("b", result_ttl=60), count=2)
        broker.ack([Ack(jid=job.jid, wid="w1") for job in jobs])
        assert broker.confirm([Delivery(job, 1.0) for job in jobs]) == set()
        assert list(Job.objects.values_list("state", "reserved_until")) == [("succeeded", None)]

    def test_a_job_locked_by_another_transaction_is_confirmed_the_next_time(self, broker):
        if connection.vendor == "sqlite":
            pytest.skip("one writer at a time")
        jobs = claimed(broker, Lease.DELIVERY, payload("a"), payload("b"), count=2)
        unconfirmed = []
        with transaction.atomic():
            Job.objects.filter(jid=jobs[0].jid).update(backtrace=1)

            def confirm():
                unconfirmed.append(broker.confirm([Delivery(job, 1.0) for job in jobs]))
                broker.close()

            other = threading.Thread(target=confirm)
            other.start()
            other.join(30)
        assert unconfirmed == [{jobs[0].jid}]
        assert broker.confirm([Delivery(job, 1.0) for job in jobs]) == set()
        assert not Job.objects.filter(claim__lt=0).exists()

    def test_a_job_that_receives_its_lock_by_handoff_has_the_delivery_lease(self, broker):
        jobs = [payload(name, custom={"lock": "key"}) for name in "abc"]
        [first] = claimed(broker, Lease.DELIVERY, *jobs)
        request = FetchRequest(queues=("default",), wid="w1", lease=Lease.DELIVERY)
        for _ in range(2):
            [found] = broker.exchange([], [Ack(jid=first.jid, wid="w1")], [request]).fetched
            [first] = found or broker.fetch([request])[0]  # not every driver hands the job over
            row = Job.objects.get(jid=first.jid)
            assert (row.claim < 0, row.reserved_until) == (True, at(DELIVERY_S))

    def test_more_jobs_than_fit_into_one_statement_are_confirmed(self, broker):
        Job.objects.bulk_create(JobFactory.many(1200, working=True, claim=-5), batch_size=1000)
        delivered = [
            Delivery(Reservation(jid=jid, queue="default", text="{}", wid="w1", attempt=1), 1.0)
            for jid in Job.objects.values_list("jid", flat=True)
        ]
        broker.confirm(delivered)
        assert not Job.objects.filter(claim__lt=0).exists()


class TestBeatsOfClients:
    def test_a_beat_extends_only_jobs_with_a_confirmed_delivery(self, broker, clock):
        WorkerFactory(wid="w1"), WorkerFactory(wid="w2")
        jobs = claimed(broker, Lease.DELIVERY, payload("a"), payload("b"), count=2)
        broker.confirm([Delivery(jobs[0], 0.0)])
        JobFactory(jid="of-another", working=True, wid="w2")
        clock.moves(1700)
        broker.beat([Beat(wid="w1", keeps_delivered=True), Beat(wid="w2")])
        ends = [reserved(jid=jid) for jid in (jobs[0].jid, jobs[1].jid, "of-another")]
        assert ends == [at(1700 + 1800), at(DELIVERY_S), at(1800)]

    def test_a_beat_keeps_a_job_whose_node_was_killed_right_after_the_delivery(self, broker, clock):
        """The job went to a second worker after 60 s although its own worker lived."""
        WorkerFactory(wid="w1"), WorkerFactory(wid="w2")
        claimed(broker, Lease.DELIVERY, payload("a", reserve_for=600))
        broker.beat([Beat(wid="w1")])
        assert reserved() == at(DELIVERY_S), "its node may still confirm it"
        clock.moves(15)
        broker.beat([Beat(wid="w2"), Beat(wid="")])
        assert reserved() == at(DELIVERY_S)
        broker.beat([Beat(wid="w1")])
        assert reserved() == at(15 + 600)

    def test_beats_keep_an_unconfirmed_job_for_one_reservation_and_it_uses_no_retry(self, broker, clock):
        WorkerFactory(wid="w1")
        claimed(broker, Lease.DELIVERY, payload("a", reserve_for=600, retry=0))
        for seconds in range(15, 700, 15):
            clock.moves(seconds)
            broker.beat([Beat(wid="w1")])
        assert reserved() == at(15 + 600)
        assert failures.reap(Store(now=clock.now)) == 1
        row = Job.objects.get()
        assert (row.state, row.failures, row.losses) == ("enqueued", 0, 0)


class TestLocks:
    def leases(self):
        return set(JobLock.objects.values_list("lease", flat=True))

    def test_the_lock_lease_of_a_client_job_equals_the_worker_timeout(self, broker):
        claimed(broker, Lease.DELIVERY, payload("a", custom={"lock": "key"}))
        assert self.leases() == {timedelta(seconds=TIMEOUT_S)}

    def test_a_worker_that_extends_its_own_locks_has_the_35_second_lease(self, broker):
        claimed(broker, Lease.HEARTBEAT, payload("a", custom={"lock": "key"}))
        assert self.leases() == {timedelta(seconds=35)}
