"""Large sets are read in portions: each job once, however many ties there are, and no job that came later."""

from datetime import timedelta

import pytest
from django.utils import timezone

from django_faktory.core.lifecycle import State
from django_faktory.models import Job, JobLock
from django_faktory.store import scan
from django_faktory.store.jobs import bulk
from django_faktory.store.locks import locks
from tests.factories import T0, JobFactory

pytestmark = [pytest.mark.portable, pytest.mark.django_db]

USING = "default"
LIVE = ("scheduled", "retries", "working", "blocked", "enqueued")
KEPT = ("dead", "succeeded", "discarded", "expired")


def make(state, count, **fields):
    traits = {} if state == "enqueued" else {state: True}
    return [row.pk for row in JobFactory.create_batch(count, **traits, **fields)]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("state", [*LIVE, *KEPT])
def test_a_scan_visits_each_job_of_a_state_exactly_once(state, size):
    ids = [
        pk
        for queue in ("a", "b")
        for sort_priority in (-1, 0)
        for pk in make(state, 2, queue=queue, sort_priority=sort_priority)
    ]
    for other in (*LIVE, *KEPT):
        if other != state:
            make(other, 1)
    seen = [pk for rows in scan.portions(State(state), ("pk",), using=USING, size=size) for (pk,) in rows]
    assert sorted(seen) == sorted(ids)


def test_a_scan_returns_enqueued_jobs_by_queue_priority_and_age():
    later = make("enqueued", 1, queue="a", enqueued_at=T0 + timedelta(seconds=1))
    first, urgent, other = (
        make("enqueued", 2, queue="a"),
        make("enqueued", 1, sort_priority=-5, queue="a"),
        make("enqueued", 1),
    )
    rows = [row for rows in scan.portions(State.ENQUEUED, ("pk",), using=USING, size=2) for row in rows]
    assert [pk for (pk,) in rows] == [*urgent, *first, *later, *other]


def test_a_scan_of_one_queue_excludes_other_queues():
    wanted, _ = make("enqueued", 5, queue="a"), make("enqueued", 5, queue="b")
    ids = scan.ids_of(Job.objects.using(USING), State.ENQUEUED, queue="a")
    assert sorted(pk for some in ids for pk in some) == wanted


def test_filters_without_an_index_apply_to_the_rows_of_the_index_scan():
    wanted, _ = make("dead", 3, jobtype="a"), make("dead", 3, jobtype="b")
    found = [pk for some in scan.ids_of(Job.objects.filter(jobtype="a"), State.DEAD, size=2) for pk in some]
    assert sorted(found) == wanted


def test_jobs_pushed_during_a_scan_are_excluded():
    wanted = make("enqueued", 5)
    walk = scan.ids_of(Job.objects.using(USING), State.ENQUEUED, size=2)
    found = next(walk)
    make("enqueued", 3)
    assert sorted([*found, *(pk for some in walk for pk in some)]) == wanted


def test_a_bulk_change_reads_job_ids_in_portions(django_assert_num_queries):
    jobs = Job.objects.filter(jobtype="a")
    wanted, _ = make("dead", 5, jobtype="a"), make("dead", 2, jobtype="b")
    with django_assert_num_queries(3):
        ids = bulk.read_ids(jobs, {State.DEAD}, portion_size=2)
    assert list(ids) == wanted


def test_a_lock_sweep_checks_a_bounded_number_of_jobs_and_then_resumes():
    for key in ("a", "b", "c"):
        make("blocked", 1, lock_key=key, queue=key)
    until, lock = timezone.now() + timedelta(hours=1), {"attempt": 1, "wid": "w1", "lease": timedelta(hours=1)}
    for key in ("a", "b"):
        JobLock.objects.create(key=key, jid=key, acquired_at=T0, expires_at=until, **lock)
    repaired, after = locks.sweep(using=USING, portions=1, portion_size=2, pause=lambda _: None)
    assert (repaired, Job.objects.enqueued().count()) == (0, 0)
    repaired, after = locks.sweep(using=USING, after=after, portions=1, portion_size=2, pause=lambda _: None)
    assert (repaired, after, Job.objects.enqueued().count()) == (1, None, 1)
