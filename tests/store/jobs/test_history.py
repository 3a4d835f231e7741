"""Jobs that have ended for good are in a table of their own (ADR 0048)."""

from datetime import timedelta

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models import F
from django.utils import timezone

from django_faktory.core.lifecycle import ENDED, State
from django_faktory.core.payloads import Ack, FetchRequest, failure
from django_faktory.models import History, Job, JobLock
from django_faktory.store.jobs import acknowledgements, bulk, claims, failures, pushes
from django_faktory.store.maintenance import due
from django_faktory.store.store import Store
from tests.factories import T0, JobFactory, payload
from tests.store import by_ids
from tests.store.limits.conftest import limit

pytestmark = pytest.mark.django_db

USING = "default"


def pushed(jid="job-00001", **fields):
    job = payload(jid, **fields)
    assert pushes.push(Store(USING), [job]) == [None]
    return job


def fetched():
    [[job]] = claims.fetch(Store(USING), [FetchRequest(queues=("default",), wid="w1")])
    return job


def acked(**fields):
    job = fetched()
    report = Ack(jid=job.jid, wid="w1", attempt=job.attempt, **fields)
    assert acknowledgements.ack(Store(USING), [report]) == [True]
    return job


def dropped(**report):
    job = fetched()
    report |= {"jid": job.jid, "wid": "w1", "attempt": job.attempt}
    assert failures.fail(Store(USING), [failure(**report, errtype="E", message="m")]) == [True]


COLUMNS = {field.attname for field in History._meta.local_concrete_fields} - {
    *("id", "day", "state", "result", "finished_at", "purge_at", "run_at", "reserved_until", "wid", "attempt"),
    *("lock_token", "limiter", "permits", "unique_key", "bid", "callback_of", "is_returned"),
}
"""Columns that a success keeps."""

ENDS = {
    "success": ({}, acked, "succeeded"),
    "success with a lock": ({"lock": "key"}, acked, "succeeded"),
    "discarded by its task": ({}, lambda: dropped(verdict="discard"), "discarded"),
    "discarded by a user": ({}, lambda: by_ids.discard([Job.live.get().pk], using=USING), "discarded"),
    "expired": (
        {"expires_in": 60},
        lambda: due.expire(Store(USING, now=timezone.now() + timedelta(hours=1))),
        "expired",
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_end_moves_the_row_to_the_history_and_keeps_its_columns(end):
    options, happens, state = ENDS[end]
    pushed(result_ttl=600, custom={"about": "shop.order/1"} | options)
    before = Job.live.get()
    happens()
    assert not Job.live.exists()
    row = History.objects.get()
    assert (row.pk, row.jid, row.state, row.about) == (before.pk, before.jid, state, "shop.order/1")
    assert (row.payload, row.created_at, row.result_ttl) == (before.payload, before.created_at, 600)
    assert (row.reserved_until, row.unique_key, row.lock_token, row.permits, row.limiter) == (None,) * 5
    assert row.purge_at >= row.finished_at
    assert row.day == row.finished_at.date()
    assert not JobLock.objects.exists()
    assert Job.objects.get().pk == row.pk


def distinct_values(row):
    """Return a different value for each column that no end changes, by the type of its present value."""
    texts = {name: f"{name} {at}" for at, (name, value) in enumerate(row.items()) if isinstance(value, str)}
    numbers = {name: at + 2 for at, (name, value) in enumerate(row.items()) if type(value) is int}
    times = {
        name: T0 + timedelta(at) for at, name in enumerate(("created_at", "enqueued_at", "failed_at", "expires_at"))
    }
    return {**texts, **numbers, **times, "has_run": False, "counts_failed": True, "cancel_requested_at": T0}


@pytest.mark.parametrize("limits", [False, True], ids=["plain", "with a permit"])
def test_a_success_changes_no_other_column(limits):
    if limits:
        limit("task", "noop", 5)
    pushed(result_ttl=600, custom={"about": "shop.order/1", "lock": "key"})
    job = fetched()
    row = Job.live.values(*COLUMNS - {"jobtype"}).get()
    Job.live.update(**distinct_values(row))
    before = Job.live.values(*COLUMNS).get()
    assert len(set(map(str, before.values()))) > 20
    assert acknowledgements.ack(Store(USING), [Ack(jid=before["jid"], wid="w1", attempt=job.attempt)]) == [True]
    assert History.objects.values(*COLUMNS).get() == before


def test_a_job_without_a_result_leaves_no_row():
    pushed()
    acked()
    assert not Job.objects.exists()


@pytest.mark.parametrize("state", sorted(ENDED))
def test_the_table_of_live_jobs_refuses_an_ended_state(state):
    job = JobFactory(dead=True)
    with pytest.raises(IntegrityError), transaction.atomic():
        Job.live.filter(pk=job.pk).update(state=state)


def test_a_jid_that_is_pushed_again_has_a_row_for_each_of_its_runs():
    pks = []
    for number in range(3):
        pushed(result_ttl=600)
        pks.append(Job.live.get().pk)
        acked(result=str(number))
    jid = pushed(result_ttl=600).jid
    latest = Job.objects.latest_of(jid)
    assert (latest.state, latest.pk) == ("enqueued", Job.live.get().pk)
    assert pks == sorted(pks)
    acked(result='"last"')
    assert Job.objects.latest_of(jid).result == '"last"'
    assert Job.objects.filter(jid=jid).count() == 4


def test_a_transaction_that_waited_for_an_ended_row_finds_none():
    """Nothing moves back: each verb on the row of an ended job changes nothing."""
    pushed(result_ttl=600)
    job = acked()
    pk = History.objects.get().pk
    assert acknowledgements.ack(Store(USING), [Ack(jid=job.jid, wid="w1", attempt=job.attempt)]) == [False]
    for verb in (by_ids.requeue, by_ids.kill, by_ids.discard):
        assert verb([pk], using=USING) == 0
    assert Job.objects.get().state == "succeeded"


def test_a_filter_by_state_reads_only_the_table_that_has_it():
    live, ended = "django_faktory_job", "django_faktory_history"
    for state in State:
        assert Job.objects.in_state(state).query.tables == {ended if state in ENDED else live}
    assert Job.objects.filter(jid="x").query.tables == {live, ended}
    assert (Job.objects.dead() | Job.objects.succeeded()).query.tables == {live, ended}
    assert Job.objects.select_for_update().query.tables == {live}
    assert not Job.live.succeeded().exists()


def test_a_list_of_all_jobs_mixes_both_tables_in_one_order():
    jobs = [JobFactory(**{state: True}) for state in ("succeeded", "dead", "expired", "scheduled", "discarded")]
    assert list(Job.objects.order_by("-pk")[1:4]) == jobs[3:0:-1]
    assert Job.objects.order_by("-pk").values_list("state", flat=True)[:2][::-1] == ["scheduled", "discarded"]
    assert Job.objects.recent(3).count() == 3
    assert set(Job.objects.newest(2)) == set(jobs[3:])
    assert Job.objects.count_up_to(4) == 4
    assert Job.objects.filter(pk__in=[jobs[0].pk, jobs[1].pk]).count() == 2
    assert Job.objects.exclude(state="dead").order_by("pk").first() == jobs[0]
    assert Job.objects.matching("state:dead,expired").count() == 2


def test_updates_and_deletions_by_a_queryset_reach_both_tables():
    jobs = [JobFactory(succeeded=True), JobFactory(dead=True)]
    assert Job.objects.update(backtrace=F("backtrace") + 7) == 2
    assert set(Job.objects.values_list("backtrace", flat=True)) == {7}
    jobs[0].delete()
    assert list(Job.objects.all()) == [jobs[1]]
    JobFactory(discarded=True)
    assert Job.objects.all().delete() == (2, {"django_faktory.Job": 1, "django_faktory.History": 1})
    assert not Job.objects.exists()


def test_prune_deletes_dead_and_ended_jobs():
    for state in ("succeeded", "dead", "expired", "scheduled"):
        JobFactory(**{state: True})
    assert Job.objects.all().prune() == 3
    assert Job.objects.get().state == "scheduled"


def test_flush_deletes_the_history_too():
    JobFactory(succeeded=True)
    JobFactory()
    for step in bulk.flush(Store(USING)):
        step()
    assert not Job.objects.exists()


def test_retention_deletes_what_is_due_in_both_tables():
    stays = [JobFactory(**{state: True}) for state in ("succeeded", "dead", "scheduled")]
    for state in ("succeeded", "discarded", "expired", "dead"):
        JobFactory.create_batch(3, **{state: True}, purge_at=T0 - timedelta(seconds=1))
    assert due.purge(Store(USING, now=T0), limit=5) == 5
    while due.purge(Store(USING, now=T0), limit=5):
        pass
    assert set(Job.objects.all()) == set(stays)


@pytest.mark.skipif(connection.vendor != "mysql", reason="MariaDB builds the union before it filters")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "find",
    [
        lambda jobs: jobs.order_by("-pk")[:10],
        lambda jobs: jobs.filter(jid="row-none"),
        lambda jobs: jobs.recent(50).queue("none").order_by("-pk")[:10],
    ],
)
def test_a_query_of_both_tables_reads_few_rows(find):
    Job.objects.bulk_create(JobFactory.many(2000, succeeded=True) + JobFactory.many(2000))
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE TABLE django_faktory_job, django_faktory_history")
        cursor.execute("FLUSH STATUS")
        list(find(Job.objects))
        cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
        assert sum(int(count) for _, count in cursor.fetchall()) < 500
