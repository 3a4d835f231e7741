"""The broker contract for OrmBroker, on the test database."""

import pytest
from django.db import transaction

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.payloads import Ack, failure
from django_faktory.core.steps import StepRecord
from django_faktory.errors import ReservationLost
from django_faktory.models import Job, JobStep, Queue
from tests.contract.batch_contract import BatchContract
from tests.contract.broker_contract import BrokerContract
from tests.contract.management_contract import ManagementContract
from tests.factories import payload


class TestOrmBroker(BatchContract, ManagementContract, BrokerContract):
    @pytest.fixture
    def broker(self):
        return OrmBroker("default")

    def test_a_released_job_is_fetched_again_from_its_old_position(self, broker, me):
        """W14: released jobs keep their `enqueued_at`."""
        jobs = [payload(), payload(), payload()]
        broker.push(jobs)
        first, second = self.fetch(broker, count=2)
        assert broker.release([second, first]) == 2
        assert [got.jid for got in self.fetch(broker, count=3)] == [job.jid for job in jobs]

    def test_releasing_an_outdated_reservation_changes_nothing(self, broker, me):
        broker.push([payload()])
        [got] = self.fetch(broker)
        assert broker.release([got]) == 1
        [again] = self.fetch(broker, wid="")
        assert broker.release([got]) == 0
        assert Job.objects.get().attempt == again.attempt

    @pytest.mark.parametrize("result_ttl", [None, 60])
    def test_a_late_report_of_an_earlier_run_of_a_jid_changes_nothing(self, broker, me, result_ttl):
        """The same worker has the job again, which was pushed again after its end."""
        job = payload(result_ttl=result_ttl)
        late = []
        for _ in range(3):
            broker.push([job])
            [got] = self.fetch(broker)
            for report in late:
                assert broker.ack([report]) == [False]
                assert broker.fail([failure(jid=job.jid, wid=me, attempt=report.attempt)]) == [False]
            held = Ack(jid=job.jid, wid=me, attempt=got.attempt)
            assert broker.ack([held]) == [True]
            late.append(held)

    @pytest.mark.parametrize("way", ["ack", "fail", "release", "lost", "bye", "push again"])
    def test_a_step_of_an_ended_reservation_is_neither_recorded_nor_read(self, broker, me, way):
        """The same worker has the job again, if it still exists."""
        job = payload(result_ttl=60 if way == "ack" else None)
        broker.push([job])
        [late] = self.fetch(broker)
        with transaction.atomic():
            broker.record_step(late, StepRecord(name="first", result="1"))
        {
            "ack": lambda: broker.ack([Ack(jid=job.jid, wid=me, attempt=late.attempt)]),
            "fail": lambda: broker.fail([failure(jid=job.jid, wid=me, attempt=late.attempt, retry_in_s=0.0)]),
            "release": lambda: broker.release([late]),
            "lost": lambda: broker.lost([me]),
            "bye": lambda: broker.bye([me]),
            "push again": lambda: (Job.objects.all().delete(), broker.push([job])),
        }[way]()
        Job.objects.filter(state="retries").retry()
        again = [] if way == "ack" else self.fetch(broker)
        with pytest.raises(ReservationLost), transaction.atomic():
            broker.record_step(late, StepRecord(name="second"))
        with pytest.raises(ReservationLost):
            broker.read_steps(late)
        with pytest.raises(ReservationLost):
            broker.read_step_result(late, "first", "")
        assert [JobStep.objects.count(), len(again)] == [1, int(way != "ack")]
        for now in again:
            assert [*broker.read_steps(now)] == ([] if way == "push again" else [("first", "")])
            if way != "push again":
                assert broker.read_step_result(now, "first", "") == "1"

    def test_a_fetch_returns_up_to_the_requested_number_of_jobs(self, broker, me):
        broker.push([payload() for _ in range(5)])
        assert len(self.fetch(broker, count=3)) == 3
        assert len(self.fetch(broker, count=3)) == 2

    def test_bye_requeues_the_jobs_of_the_worker(self, broker, me):
        broker.push([payload()])
        self.fetch(broker)
        broker.bye([me])
        job = Job.objects.get()
        assert (job.state, job.wid, job.failures) == ("enqueued", "", 0)

    def test_a_job_becomes_dead_at_its_third_lost_worker(self, broker):
        """W20: the third loss makes the job dead."""
        broker.push([payload(result_ttl=60)])
        for loss in (1, 2, 3):
            self.fetch(broker, wid="wid-lost")
            assert broker.lost(["wid-lost"]) == 1
            job = Job.objects.get()
            assert (job.losses, job.failures) == (loss, 0)
        assert (job.state, job.errtype) == ("dead", "WorkerLost")

    def test_ack_returns_whether_each_report_had_an_effect(self, broker, me):
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

    def test_a_queue_removed_by_another_node_is_stored_again_by_a_push(self):
        """W24: a broker caches the names of known queues for a limited time."""
        broker = OrmBroker("default", remember_queue_s=0.0)
        broker.push([payload(queue="q")])
        OrmBroker("default").remove(["q"])
        broker.push([payload(queue="q")])
        assert Queue.objects.filter(name="q").exists()
