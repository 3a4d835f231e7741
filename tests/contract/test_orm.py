"""The broker contract for OrmBroker, on the test database."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_faktory.brokers import orm, serving_broker
from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.histograms import Recorder
from django_faktory.core.payloads import Ack
from django_faktory.models import Job, Queue
from django_faktory.store import shared_reads
from tests.contract.batch_contract import BatchContract
from tests.contract.broker_contract import BrokerContract
from tests.contract.management_contract import ManagementContract
from tests.factories import payload


class TestOrmBroker(BatchContract, ManagementContract, BrokerContract):
    @pytest.fixture
    def broker(self):
        return OrmBroker("default")

    def test_what_was_given_back_is_fetched_again_from_its_old_place(self, broker, me):
        """W14: released jobs keep their `enqueued_at`."""
        jobs = [payload(), payload(), payload()]
        broker.push(jobs)
        first, second = self.fetch(broker, count=2)
        assert broker.release([second, first]) == 2
        assert [got.jid for got in self.fetch(broker, count=3)] == [job.jid for job in jobs]

    def test_giving_back_twice_or_by_a_stranger_changes_nothing(self, broker, me):
        broker.push([payload()])
        [got] = self.fetch(broker)
        assert broker.release([got]) == 1
        [again] = self.fetch(broker, wid="")
        assert broker.release([got]) == 0
        assert Job.objects.get().attempt == again.attempt

    def test_one_fetch_takes_as_many_as_it_asks_for(self, broker, me):
        broker.push([payload() for _ in range(5)])
        assert len(self.fetch(broker, count=3)) == 3
        assert len(self.fetch(broker, count=3)) == 2

    def test_a_worker_that_says_goodbye_leaves_its_jobs_to_others(self, broker, me):
        broker.push([payload()])
        self.fetch(broker)
        broker.bye([me])
        job = Job.objects.get()
        assert (job.state, job.wid, job.failures) == ("enqueued", "", 0)

    def test_a_lost_worker_costs_its_jobs_no_retry_until_the_third_time(self, broker):
        """W20: the third loss makes the job dead."""
        broker.push([payload(result_ttl=60)])
        for loss in (1, 2, 3):
            self.fetch(broker, wid="wid-lost")
            assert broker.lost(["wid-lost"]) == 1
            job = Job.objects.get()
            assert (job.losses, job.failures) == (loss, 0)
        assert (job.state, job.errtype) == ("dead", "WorkerLost")

    def test_answers_of_ack_tell_what_had_effect(self, broker, me):
        broker.push([payload(), payload()])
        first, second = self.fetch(broker, count=2)
        acks = [
            Ack(jid=first.jid, wid=me, attempt=first.attempt),
            Ack(jid=first.jid, wid=me, attempt=first.attempt),
            Ack(jid=second.jid, wid="wid-stranger"),
            Ack(jid="not\x00storable"),
            Ack(jid=second.jid),
        ]
        assert broker.ack(acks) == [True, False, False, False, True]

    def test_a_queue_that_another_node_removed_is_listed_again_when_it_is_used(self, broker, monkeypatch):
        """W24: a broker caches the names of known queues for a limited time."""
        monkeypatch.setattr(orm, "REMEMBER_QUEUE_S", 0.0)
        broker.push([payload(queue="q")])
        OrmBroker("default").remove(["q"])
        broker.push([payload(queue="q")])
        assert Queue.objects.filter(name="q").exists()


class TestSharingBroker(ManagementContract):
    """A server's broker shares INFO and QUEUE LATENCY between callers: it returns a recent result if the read was
    cheap.
    """

    @pytest.fixture
    def broker(self):
        return OrmBroker("default", shares_numbers=True)

    @pytest.fixture(autouse=True)
    def _reads_are_cheap(self, monkeypatch):
        """Make reads count as cheap even on a busy machine."""
        monkeypatch.setattr(shared_reads, "CHEAP_S", 60.0)
        monkeypatch.setattr(shared_reads, "COST", 0)

    def test_callers_share_a_read(self, broker, monkeypatch):
        monkeypatch.setattr(shared_reads, "CHEAP_S", 0.0)
        monkeypatch.setattr(shared_reads, "KEPT_S", 60.0)
        assert (broker.info()["queues"], broker.latency(["q"])) == ({}, {"q": 0.0})
        broker.push([payload(queue="q")])
        with CaptureQueriesContext(connection) as caught:
            assert (broker.info()["queues"], broker.latency(["q"])) == ({}, {"q": 0.0})
        assert len(caught) == 0

    def test_a_server_has_such_a_broker(self):
        assert serving_broker(lambda *_: None, Recorder())._shares_numbers
