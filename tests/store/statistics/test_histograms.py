"""Sums of minutes become sums of hours; quantiles are estimated from buckets."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from django.db import connection, connections, transaction
from django.utils import timezone

from django_faktory.core.histograms import BOUNDS_S, BUCKETS, JobTiming, Recorder, Series, estimate_quantile
from django_faktory.models import Measure
from django_faktory.operations import timings
from django_faktory.operations.timings import PERIODS, QUEUE, TASK
from django_faktory.runtime.maintenance import Maintenance
from django_faktory.store.statistics import histograms
from tests.factories import WorkerFactory

USING = "default"
HOUR = datetime(2026, 5, 1, 12, tzinfo=UTC)


def add(at, *, queue="mail", task="send", seconds=(0.01,), failures=0):
    recorder = Recorder()
    jobs = [JobTiming(queue, task, one) for one in seconds]
    recorder.started(jobs)
    recorder.ended(jobs[failures:], succeeded=True)
    recorder.ended(jobs[:failures], succeeded=False)
    histograms.add(recorder.take(), using=USING, now=at)


@pytest.mark.core
class TestQuantiles:
    def test_no_jobs_have_no_quantile(self):
        assert estimate_quantile([0] * BUCKETS, 0.5) is None

    def test_a_quantile_lies_within_the_bucket_of_its_job(self):
        counts = [0] * BUCKETS
        counts[3], counts[6] = 90, 10
        assert BOUNDS_S[2] < estimate_quantile(counts, 0.5) <= BOUNDS_S[3]
        assert BOUNDS_S[5] < estimate_quantile(counts, 0.95) < estimate_quantile(counts, 0.99) <= BOUNDS_S[6]

    def test_jobs_beyond_the_last_bound_count_as_that_bound(self):
        assert estimate_quantile([0] * (BUCKETS - 1) + [5], 0.5) == BOUNDS_S[-1]


@pytest.mark.django_db(transaction=True)
class TestHours:
    def test_the_minutes_of_an_hour_become_one_row_of_each_queue_and_task(self):
        for minute in (0, 7, 59):
            add(HOUR + timedelta(minutes=minute), seconds=(0.01, 3.0), failures=1)
        add(HOUR + timedelta(minutes=5), task="other")
        add(HOUR + timedelta(minutes=60))
        before = histograms.read_tasks("mail", using=USING, since=HOUR - timedelta(minutes=1))
        assert histograms.fold_hour(HOUR, using=USING) == 3
        assert histograms.fold_hour(HOUR, using=USING) is None
        minutes = Measure.objects.exclude(minute=histograms.ALL_TIME).values_list("minute", "jobtype", "started")
        assert sorted(minutes) == [(HOUR, "other", 1), (HOUR, "send", 6), (HOUR + timedelta(hours=1), "send", 1)]
        assert histograms.read_tasks("mail", using=USING, since=HOUR - timedelta(minutes=1)) == before

    def test_a_large_hour_is_folded_in_portions_without_a_loss(self):
        for minute in range(1, 10):
            add(HOUR + timedelta(minutes=minute))
        while histograms.fold_hour(HOUR, using=USING, limit=4):
            pass
        assert Measure.objects.get(minute=HOUR).started == 9

    @pytest.mark.skipif(connection.vendor != "postgresql", reason="MariaDB locks the gap of the new row too")
    def test_maintenance_returns_later_to_rows_that_another_transaction_has_locked(self):
        hour = timezone.now().replace(minute=0, second=0, microsecond=0) - timedelta(hours=9)
        for minute in (1, 2):
            add(hour + timedelta(minutes=minute))
        add(hour + timedelta(minutes=61))
        minutes = Measure.objects.filter(minute__gt=hour, minute__lt=hour + timedelta(hours=1))
        maintenance = Maintenance(USING)

        def fold():
            # At most once for each hour and the empty rest: it must not repeat while the rows are locked.
            try:
                return [maintenance._fold_minutes() for _ in range(3)]
            finally:
                connections.close_all()

        with ThreadPoolExecutor(1) as pool:
            with transaction.atomic():
                list(minutes.filter(minute=hour + timedelta(minutes=2)).select_for_update())
                assert False in pool.submit(fold).result(60)
                assert minutes.count() == 1
            pool.submit(fold).result(60)
        assert not minutes.exists()
        assert Measure.objects.get(minute=hour).started == 2

    def test_maintenance_folds_old_hours_and_keeps_recent_minutes(self):
        now = timezone.now()
        old = [now - timedelta(seconds=histograms.MINUTES_KEPT_S, hours=1, minutes=minute) for minute in range(120)]
        recent = [now - timedelta(minutes=minute) for minute in range(30)]
        for at in (*old, *recent):
            add(at.replace(second=0, microsecond=0))
        maintenance = Maintenance(USING)
        while maintenance._fold_minutes():
            pass
        rows = Measure.objects.exclude(minute=histograms.ALL_TIME)
        limit = now - timedelta(seconds=histograms.MINUTES_KEPT_S)
        assert rows.filter(minute__gt=limit).count() == 30
        assert rows.filter(minute__lt=limit).count() <= 3
        assert sum(rows.values_list("started", flat=True)) == 150


@pytest.mark.django_db
class TestTables:
    def test_a_table_has_the_figures_of_each_task_in_the_period(self):
        now = timezone.now()
        add(now - timedelta(minutes=5), seconds=(0.01, 0.01, 0.01, 40.0), failures=1)
        add(now - timedelta(minutes=9), queue="low", seconds=(0.01,) * 6)
        add(now - timedelta(hours=5), task="older")
        [send] = timings.read_table(TASK, PERIODS["1h"], using=USING)
        assert (send.name, send.started, send.ended, send.failed, send.failed_percent) == ("send", 10, 10, 1, 10.0)
        assert send.per_minute == pytest.approx(10 / 60)
        p50, p95, p99 = send.runs
        assert 0.005 < p50 <= 0.025
        assert 15 < p95 < p99 <= 60
        assert [one.name for one in timings.read_table(TASK, PERIODS["24h"], using=USING)] == ["send", "older"]
        assert [one.name for one in timings.read_table(QUEUE, PERIODS["1h"], using=USING)] == ["low", "mail"]
        history = timings.read_history("mail", QUEUE, PERIODS["24h"], using=USING)
        assert timings.build_total("mail", history, PERIODS["1h"]).ended == 4
        assert timings.build_total("mail", history, PERIODS["24h"]).ended == 5
        [of_low] = timings.read_tasks_of_queue("low", PERIODS["1h"], using=USING)
        assert (of_low.name, of_low.ended) == ("send", 6)

    @pytest.mark.parametrize(("period", "count"), [("1h", 30), ("24h", 24), ("30d", 30)])
    def test_the_intervals_of_a_period_contain_its_jobs_once(self, period, count):
        now = timezone.now()
        for share in (0.02, 0.3, 0.6, 0.9):
            add(now - PERIODS[period].length * share)
        history = timings.read_history("send", TASK, PERIODS[period], using=USING)
        intervals = timings.split_intervals(history, PERIODS[period])
        assert len(intervals) == count
        assert [at for at, _ in intervals] == sorted(at for at, _ in intervals)
        assert sum(series.started for _, series in intervals) == 4

    @pytest.mark.parametrize(
        ("period", "now"),
        [("24h", datetime(2026, 10, 25, 12, 30, tzinfo=UTC)), ("30d", datetime(2026, 11, 3, tzinfo=UTC))],
    )
    def test_jobs_stay_in_their_interval_when_the_clock_is_set_back(self, settings, monkeypatch, period, now):
        settings.TIME_ZONE = "Europe/Berlin"
        monkeypatch.setattr(timings.timezone, "now", lambda: now)
        starts = PERIODS[period].starts(now)
        inside = [at.astimezone(UTC) + timedelta(minutes=7) for at in starts]  # as the database returns times
        history = {at: Series(started=1) for at in inside}
        assert [series.started for _, series in timings.split_intervals(history, PERIODS[period])] == [1] * len(starts)
        elapsed = {after.timestamp() - before.timestamp() for before, after in pairwise(starts)}
        assert elapsed == ({3600} if period == "24h" else {86_400, 90_000})

    def test_workers_that_start_together_count_as_one_deployment(self):
        now = timezone.now()
        for minutes in (90, 89, 88, 10):
            WorkerFactory(started_at=now - timedelta(minutes=minutes))
        found = timings.read_deployments(now - timedelta(hours=2), using=USING)
        assert [count for _, count in found] == [3, 1]
