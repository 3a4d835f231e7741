"""Limits of one process, by the number of its jobs and by its memory after each job."""

import threading
from random import Random

import pytest

from django_faktory.worker.heartbeat import rss_kb
from django_faktory.worker.recycling import RecyclePolicy

pytestmark = pytest.mark.core


def share(max_jobs=None, max_rss=None, seed=0):
    return RecyclePolicy(max_jobs=max_jobs, max_rss=max_rss, rng=Random(seed))


def jobs_until_done(one):
    return next(jobs for jobs in range(1, 10_000) if one.count_job())


def test_a_process_runs_max_jobs_or_up_to_a_quarter_more():
    found = [jobs_until_done(share(max_jobs=100, seed=seed)) for seed in range(200)]
    assert min(found) >= 100
    assert max(found) <= 125
    assert len(set(found)) > 20


def test_max_jobs_of_one_allows_exactly_one_job():
    assert {jobs_until_done(share(max_jobs=1, seed=seed)) for seed in range(20)} == {1}


def test_the_reason_for_recycling_is_returned_only_once():
    one = share(max_jobs=1)
    assert one.count_job() == "it ran 1 job"
    assert [one.count_job() for _ in range(3)] == ["", "", ""]


def test_jobs_that_end_concurrently_are_all_counted():
    one, reasons, barrier = share(max_jobs=8000), [], threading.Barrier(8)

    def end_many():
        barrier.wait()
        reasons.extend(filter(None, (one.count_job() for _ in range(2000))))

    threads = [threading.Thread(target=end_many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reasons) == 1


def test_memory_above_max_rss_after_a_job_triggers_recycling():
    bound = rss_kb() // 1024 + 30
    one = share(max_rss=bound)
    one.begin()
    assert one.count_job() == ""
    kept = b"\xff" * (60 * 2**20)
    assert one.count_job().endswith(f"MB, MAX_RSS is {bound}")
    assert len(kept)


def test_max_rss_exceeded_before_the_first_job_is_logged_and_ignored(caplog):
    one = share(max_rss=1)
    one.begin()
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert "MAX_RSS is 1 MB" in record.getMessage()
    assert one.count_job() == ""


def test_max_jobs_still_applies_after_max_rss_is_ignored(caplog):
    one = share(max_jobs=1, max_rss=1)
    one.begin()
    assert one.count_job() == "it ran 1 job"
    assert len(caplog.records) == 1
