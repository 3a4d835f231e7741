"""Metrics that a process records about its jobs, and how they are stored in the database."""

import contextlib
import sqlite3
import threading
from datetime import timedelta

import pytest
from django.db import OperationalError, connection

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.histograms import BOUNDS_S, OTHER, JobTiming, Recorder
from django_faktory.core.payloads import Ack, FetchRequest, failure
from django_faktory.errors import BrokerUnavailable
from django_faktory.models import Job, Measure
from django_faktory.runtime.metrics_flusher import MetricsFlusher
from django_faktory.store import transactions
from django_faktory.store.dialects import dialect_of
from django_faktory.store.statistics import histograms as histogram_rows
from tests.factories import T0, JobFactory, payload

pytestmark = pytest.mark.once_if_quick

USING = "default"
MAIL = ("mail", "send")


def series(**sums):
    recorder = Recorder()
    recorder.started([JobTiming(*MAIL, sums.get("wait", 0.01))] * sums.get("started", 0))
    recorder.ended([JobTiming(*MAIL, sums.get("run", 0.01))] * sums.get("succeeded", 0), succeeded=True)
    recorder.ended([JobTiming(*MAIL, sums.get("run", 0.01))] * sums.get("failed", 0), succeeded=False)
    return recorder.take()


@pytest.mark.core
class TestRecorder:
    def test_sums_by_queue_and_task_and_resets_after_take(self):
        recorder = Recorder()
        recorder.started(
            [JobTiming("mail", "send", 0.5), JobTiming("mail", "send", 1.5), JobTiming("low", "send", 0.0)]
        )
        recorder.ended([JobTiming("mail", "send", 2.0)], succeeded=True)
        recorder.ended([JobTiming("mail", "send", 4.0)], succeeded=False)
        taken = recorder.take()
        assert set(taken) == {("mail", "send"), ("low", "send")}
        mail = taken[MAIL]
        assert (mail.started, mail.succeeded, mail.failed, mail.waited_s, mail.ran_s) == (2, 1, 1, 2.0, 6.0)
        assert recorder.take() == {}

    @pytest.mark.parametrize(("seconds", "place"), [(0.0, 0), (0.005, 0), (0.0051, 1), (7200.0, 10), (1e9, 11)])
    def test_a_bucket_includes_durations_equal_to_its_upper_bound(self, seconds, place):
        recorder = Recorder()
        recorder.ended([JobTiming(*MAIL, seconds)], succeeded=True)
        assert recorder.take()[MAIL].runs.index(1) == place
        assert len(BOUNDS_S) == 11

    def test_series_beyond_the_maximum_are_merged_into_one(self):
        recorder = Recorder(max_series=3)
        recorder.started(JobTiming("q", f"task{number}", 0.0) for number in range(10))
        recorder.started([JobTiming("q", "task0", 0.0)])
        taken = recorder.take()
        assert {names: sums.started for names, sums in taken.items()} == {
            ("q", "task0"): 2, ("q", "task1"): 1, ("q", "task2"): 1, (OTHER, OTHER): 7,
        }  # fmt: skip

    def test_concurrent_threads_lose_no_measurements(self):
        recorder, taken = Recorder(), []

        def note():
            for _ in range(500):
                recorder.started([JobTiming(*MAIL, 0.0)])

        threads = [threading.Thread(target=note) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            taken.append(recorder.take())
        taken.append(recorder.take())
        assert sum(found[MAIL].started for found in taken if found) == 2000

    def test_restored_series_are_merged_with_newer_ones(self):
        recorder = Recorder()
        recorder.started([JobTiming(*MAIL, 1.0)])
        taken = recorder.take()
        recorder.started([JobTiming(*MAIL, 2.0)])
        recorder.restore(taken)
        assert recorder.take()[MAIL].waited_s == 3.0


@pytest.mark.django_db
class TestSums:
    def test_sums_of_two_processes_are_added_per_minute_and_in_total(self):
        histogram_rows.add(series(started=2, succeeded=1), using=USING, now=T0)
        histogram_rows.add(series(started=1, failed=3, run=2.0), using=USING, now=T0)
        histogram_rows.add(series(started=5), using=USING, now=T0 + timedelta(minutes=1))
        ever = histogram_rows.read_totals(using=USING)[MAIL]
        assert (ever.started, ever.succeeded, ever.failed) == (8, 1, 3)
        assert ever.ran_s == pytest.approx(6.01)
        assert sum(ever.runs) == 4
        minutes = Measure.objects.filter(minute__gte=T0 - timedelta(hours=1)).order_by("minute")
        assert list(minutes.values_list("started", flat=True)) == [3, 5]

    def test_purge_deletes_old_minutes_and_keeps_totals(self):
        histogram_rows.add(series(started=1), using=USING)  # a current minute
        histogram_rows.add(series(started=1), using=USING, now=T0 - timedelta(days=400))
        assert histogram_rows.purge(using=USING, kept_for_s=86_400) == 1
        assert histogram_rows.purge(using=USING, kept_for_s=86_400) == 0
        assert Measure.objects.count() == 2
        assert histogram_rows.read_totals(using=USING)[MAIL].started == 2


@pytest.mark.django_db(transaction=True)
class TestBroker:
    def test_records_wait_times_run_times_and_outcomes_of_jobs(self):
        recorder = Recorder()
        broker = OrmBroker(USING, recorder=recorder)
        broker.push([payload("1", "mailing"), payload("2", "mailing"), payload("3", "mailing", result_ttl=60)])
        Job.objects.update(enqueued_at=T0, created_at=T0)
        [found] = broker.fetch([FetchRequest(queues=("default",), wid="w", count=3)])
        assert {job.jobtype for job in found} == {"mailing"}
        good, bad, kept = (job.jid for job in found)
        broker.ack([Ack(jid=good, wid="w"), Ack(jid=kept, wid="w"), Ack(jid="unknown", wid="w")])
        broker.fail([failure(jid=bad, wid="w"), failure(jid="unknown")])
        [(names, sums)] = recorder.take().items()
        assert names == ("default", "mailing")
        assert (sums.started, sums.succeeded, sums.failed) == (3, 2, 1)
        assert sums.waits[-1] == 3, "since T0, which is years ago"
        assert 0 <= sums.ran_s < 60

    def test_records_starts_and_ends_of_an_exchange(self):
        recorder = Recorder()
        broker = OrmBroker(USING, recorder=recorder)
        job = JobFactory(working=True, wid="w")
        broker.exchange(
            [payload("new")], [Ack(jid=job.jid, wid="w")], [FetchRequest(queues=("default",), wid="w", count=1)]
        )
        taken = recorder.take()
        assert sum(sums.started for sums in taken.values()) == 1
        assert sum(sums.succeeded for sums in taken.values()) == 1

    def test_a_retried_failure_of_an_already_acknowledged_job_is_not_recorded(self, monkeypatch):
        recorder = Recorder()
        broker = OrmBroker(USING, recorder=recorder)
        job = JobFactory(working=True, wid="w")
        attempts, busy = [], sqlite3.OperationalError("database is locked")
        busy.sqlite_errorname = "SQLITE_BUSY"

        def collides_once(*_, **__):
            attempts.append(1)
            raise OperationalError("database is locked") from busy

        def meanwhile(_):
            monkeypatch.undo()
            assert OrmBroker(USING).ack([Ack(jid=job.jid, wid="w")]) == [True]

        monkeypatch.setattr(dialect_of(connection), "save", collides_once, raising=False)
        monkeypatch.setattr(transactions.time, "sleep", meanwhile)
        broker.fail([failure(jid=job.jid, wid="w")])
        assert attempts == [1]
        assert recorder.take() == {}

    def test_an_acknowledgement_that_is_rolled_back_is_not_recorded(self):
        recorder = Recorder()
        broker = OrmBroker(USING, recorder=recorder)
        job = JobFactory(working=True, wid="w")
        with contextlib.suppress(ZeroDivisionError), broker.atomic():
            assert broker.ack([Ack(jid=job.jid, wid="w", attempt=job.attempt)]) == [True]
            raise ZeroDivisionError
        assert recorder.take() == {}


@pytest.mark.django_db(transaction=True)
class TestBookkeeper:
    def test_the_flusher_writes_remaining_metrics_when_it_is_stopped(self):
        recorder = Recorder()
        keeper = MetricsFlusher(USING, recorder, every_s=3600)
        thread = threading.Thread(target=keeper.run)
        thread.start()
        recorder.started([JobTiming(*MAIL, 0.1)])
        keeper.stop()
        thread.join(60)
        assert histogram_rows.read_totals(using=USING)[MAIL].started == 1

    def test_the_flusher_keeps_metrics_while_the_database_is_unavailable(self, monkeypatch):
        recorder = Recorder()
        keeper = MetricsFlusher(USING, recorder)
        recorder.started([JobTiming(*MAIL, 0.1)])

        def unavailable(*_, **__):
            raise BrokerUnavailable("database unavailable: gone fishing")

        with monkeypatch.context() as patch:
            patch.setattr(histogram_rows, "add", unavailable)
            keeper.write()
        keeper.write()
        assert histogram_rows.read_totals(using=USING)[MAIL].started == 1
