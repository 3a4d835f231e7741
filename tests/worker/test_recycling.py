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


def test_the_jobs_of_a_process_are_as_many_as_was_said_or_up_to_a_quarter_more():
    found = [jobs_until_done(share(max_jobs=100, seed=seed)) for seed in range(200)]
    assert min(found) >= 100
    assert max(found) <= 125
    assert len(set(found)) > 20


def test_a_share_of_one_job_is_one_job():
    assert {jobs_until_done(share(max_jobs=1, seed=seed)) for seed in range(20)} == {1}


def test_it_is_said_once_and_why():
    one = share(max_jobs=1)
    assert one.count_job() == "it ran 1 job"
    assert [one.count_job() for _ in range(3)] == ["", "", ""]


def test_jobs_that_end_at_the_same_time_are_counted_each():
    one, said, barrier = share(max_jobs=8000), [], threading.Barrier(8)

    def end_many():
        barrier.wait()
        said.extend(filter(None, (one.count_job() for _ in range(2000))))

    threads = [threading.Thread(target=end_many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 1


def test_memory_counts_after_a_job():
    bound = rss_kb() // 1024 + 30
    one = share(max_rss=bound)
    one.begin()
    assert one.count_job() == ""
    kept = b"\xff" * (60 * 2**20)
    assert one.count_job().endswith(f"MB, MAX_RSS is {bound}")
    assert len(kept)


def test_without_a_bound_nothing_is_ever_enough():
    one = share()
    one.begin()
    assert not any(one.count_job() for _ in range(10_000))


def test_a_bound_that_is_passed_before_the_first_job_is_an_error_and_not_kept(caplog):
    one = share(max_rss=1)
    one.begin()
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert "MAX_RSS is 1 MB" in record.getMessage()
    assert one.count_job() == ""


def test_jobs_go_on_to_be_counted_where_memory_is_not_bounded_any_more(caplog):
    one = share(max_jobs=1, max_rss=1)
    one.begin()
    assert one.count_job() == "it ran 1 job"
    assert len(caplog.records) == 1
