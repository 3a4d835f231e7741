"""Unique jobs and jobs that expire: locks and their ends, races, the sweep, and what it costs the others. Rule: W27."""

from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_faktory.admission import parse_job
from django_faktory.errors import NotUnique
from django_faktory.models import Job
from django_faktory.payloads import Ack, FetchRequest, failure, rfc3339
from django_faktory.store import failures, jobs, operations, optioned, upkeep
from tests.factories import T0, JobFactory, payload
from tests.store.test_claims import in_threads

pytestmark = pytest.mark.django_db(transaction=True)

USING = "default"
MINUTE = timedelta(minutes=1)


def unique(args=(1,), **fields):
    custom = {"unique_for": 600} | fields.pop("custom", {})
    return payload(args=args, custom=custom, **fields)


def push(*sent, now=None):
    """Which were taken."""
    answers = jobs.push(sent, using=USING, now=now)
    assert all(answer is None or isinstance(answer, NotUnique) for answer in answers)
    return [answer is None for answer in answers]


def fetch(*, now=None, count=1, wid="w1"):
    [found] = jobs.fetch([FetchRequest(queues=("default",), wid=wid, count=count)], using=USING, now=now)
    return found


# --- the lock


@pytest.mark.parametrize(
    "other",
    [unique(args=[2]), unique(jobtype="other"), unique(queue="other"), unique(custom={"kwargs": {"a": 1}})],
    ids=["args", "jobtype", "queue", "kwargs"],
)
def test_jobs_of_another_kind_are_free(other):
    assert push(unique()) == [True]
    assert push(other) == [True]


def test_a_job_without_unique_for_goes_past_the_lock():
    assert push(unique()) == [True]
    assert push(payload(args=[1])) == [True]


def test_the_lock_ends_at_its_time_whatever_its_job_does():
    assert push(unique(), now=T0) == [True]
    assert fetch(now=T0)
    assert push(unique(), now=T0 + 10 * MINUTE - timedelta(seconds=1)) == [False]
    assert push(unique(), now=T0 + 10 * MINUTE) == [True]
    assert Job.objects.filter(unique_key__isnull=False).count() == 1


def test_a_later_start_adds_its_delay_to_the_lock():
    assert push(unique(at=T0 + 60 * MINUTE), now=T0) == [True]
    assert push(unique(), now=T0 + 69 * MINUTE) == [False]
    assert push(unique(), now=T0 + 70 * MINUTE) == [True]


@pytest.mark.parametrize("kept", [None, 600], ids=["plain", "kept"])
def test_the_lock_is_free_when_its_job_is_discarded_by_hand(kept):
    push(unique(result_ttl=kept))
    operations.discard([Job.objects.get().pk], using=USING)
    assert push(unique()) == [True]


@pytest.mark.parametrize("kept", [None, 600], ids=["plain", "kept"])
def test_the_lock_is_free_when_its_job_succeeded_was_discarded_or_expired(kept):
    def report(job):
        return [failure(jid=job.jid, verdict="discard")]

    push(unique(result_ttl=kept))
    [job] = fetch()
    jobs.ack([Ack(jid=job.jid)], using=USING)
    assert push(unique(result_ttl=kept)) == [True]
    [job] = fetch()
    failures.fail(report(job), using=USING)
    assert push(unique(result_ttl=kept, custom={"expires_at": rfc3339(T0)})) == [True]
    assert upkeep.expire(using=USING) == 1
    assert push(unique()) == [True]


def test_the_lock_is_free_when_its_row_is_deleted():
    push(unique())
    Job.objects.all().delete()
    assert push(unique()) == [True]


def test_a_dead_job_keeps_its_lock_until_its_time():
    push(unique(retry=-1), now=T0)
    [job] = fetch(now=T0)
    failures.fail([failure(jid=job.jid)], using=USING, now=T0)
    assert Job.objects.get().state == "dead"
    assert push(unique(), now=T0 + MINUTE) == [False]
    assert push(unique(), now=T0 + 10 * MINUTE) == [True]


def test_a_dead_job_that_is_sent_again_takes_its_own_lock_over():
    """W10."""
    job = unique(retry=-1)
    push(job)
    [held] = fetch()
    failures.fail([failure(jid=held.jid)], using=USING)
    assert push(job) == [True]
    row = Job.objects.get()
    assert (row.state, row.attempt, row.failures) == ("enqueued", held.attempt, 0)
    assert push(unique()) == [False]


def test_a_plain_job_that_takes_the_place_of_a_dead_one_frees_its_lock():
    push(unique(jid="again", retry=-1))
    [held] = fetch()
    failures.fail([failure(jid=held.jid)], using=USING)
    assert push(payload("again", args=[1])) == [True]
    row = Job.objects.get()
    assert (row.state, row.unique_key, row.unique_expires_at, row.expires_at) == ("enqueued", None, None, None)


def test_a_living_jid_neither_takes_a_lock_nor_is_refused():
    """W10."""
    push(payload("lives", args=[1]))
    assert push(unique(jid="lives"), unique()) == [True, True]
    assert push(unique(jid="lives"), unique()) == [True, False]


def test_a_refused_jid_that_comes_twice_in_a_set_is_refused_twice():
    push(unique())
    assert push(unique(jid="twin"), unique(jid="twin")) == [False, False]


def test_a_large_set_with_many_kinds_is_pushed_whole():
    assert push(*(unique(args=[number % 700]) for number in range(1400))) == [True] * 700 + [False] * 700


def test_a_lock_until_the_start_comes_not_back_with_a_failure():
    push(unique(custom={"unique_until": "start"}))
    [job] = fetch()
    failures.fail([failure(jid=job.jid)], using=USING)
    assert Job.objects.get().unique_key is None
    assert push(unique()) == [True]


# --- races


def test_of_many_nodes_that_push_one_kind_at_once_exactly_one_wins():
    taken = []

    def work(number):
        for round_ in range(5):
            taken.extend((round_, was_taken) for was_taken in push(unique(args=[round_])))

    in_threads(6, work)
    assert sorted(round_ for round_, was_taken in taken if was_taken) == [0, 1, 2, 3, 4]
    assert len(taken) == 30
    assert Job.objects.count() == 5


def test_sets_with_the_same_kinds_in_other_orders_do_not_block_each_other():
    taken = []

    def work(number):
        kinds = list(range(40))
        taken.append(push(*(unique(args=[kind]) for kind in (kinds if number % 2 else reversed(kinds)))))

    in_threads(4, work)
    assert sum(was_taken for answers in taken for was_taken in answers) == 40
    assert Job.objects.count() == 40


def test_one_jid_pushed_by_many_at_once_is_one_job_and_refused_to_none():
    job = unique()
    answers = []
    in_threads(6, lambda _: answers.extend(push(job)))
    assert answers == [True] * 6
    assert Job.objects.count() == 1


@pytest.mark.skipif("not connection.features.has_select_for_update", reason="SQLite has one writer at a time")
def test_a_lock_taken_after_the_look_is_seen_in_the_second_one(monkeypatch):
    """As when another node commits between the look and the insert."""
    looks, look = [], optioned._holders

    def look_and_lose(here, keys):
        found = look(here, keys)
        looks.append(len(found))
        if len(looks) == 1:
            in_threads(1, lambda _: push(unique()))
        return found

    monkeypatch.setattr(optioned, "_holders", look_and_lose)
    assert push(unique()) == [False]
    assert looks == [0, 0, 1]  # ours, the other's, ours


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="a snapshot that does not see the other's row")
def test_in_a_transaction_that_sees_only_its_start_a_refusal_is_no_error():
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute(f"SELECT COUNT(*) FROM {Job._meta.db_table}")
        in_threads(1, lambda _: push(unique()))
        assert push(unique(), unique(args=[2])) == [False, True]
    assert Job.objects.count() == 2


def test_a_rollback_takes_job_and_lock_along():
    with transaction.atomic():
        push(unique())
        transaction.set_rollback(True)
    assert push(unique()) == [True]


# --- what it costs the others


def test_plain_jobs_are_pushed_by_one_statement_as_ever():
    push(payload())
    with CaptureQueriesContext(
        connection,
    ) as captured:
        push(payload())
    # A connection that was used before, as one of a pool, may prepare its statement now.
    told = [query["sql"] for query in captured if "PREPARE" not in query["sql"]]
    assert len([sql for sql in told if "INSERT" in sql or "EXECUTE" in sql]) == 1
    assert not [sql for sql in told if "SAVEPOINT" in sql or "BEGIN" in sql]


# --- expiry


def test_a_job_is_handed_out_until_it_expires_and_not_after():
    push(payload(custom={"expires_in": 60}), payload(custom={"expires_in": 60}), now=T0)
    assert len(fetch(now=T0 + timedelta(seconds=59))) == 1
    assert fetch(now=T0 + timedelta(seconds=60)) == []


def test_expires_in_counts_from_a_later_start():
    push(payload(at=T0 + 60 * MINUTE, custom={"expires_in": 60}), now=T0)
    assert Job.objects.get().expires_at == T0 + 61 * MINUTE


def test_of_two_ends_the_earlier_holds():
    push(payload(custom={"expires_in": 60, "expires_at": rfc3339(T0 + 60 * MINUTE)}), now=T0)
    push(payload(custom={"expires_in": 600, "expires_at": rfc3339(T0 + MINUTE)}), now=T0)
    assert set(Job.objects.values_list("expires_at", flat=True)) == {T0 + MINUTE}


@pytest.mark.parametrize("state", ["scheduled", "retries"])
def test_a_job_that_falls_due_after_it_expired_is_not_handed_out(state):
    JobFactory(**{state: True}, expires_at=T0 + 30 * MINUTE, run_at=T0 + 60 * MINUTE)
    assert upkeep.enqueue_due(using=USING, now=T0 + 60 * MINUTE) == {"default"}
    assert fetch(now=T0 + 60 * MINUTE) == []


def test_a_job_that_a_worker_holds_does_not_expire():
    push(payload(custom={"expires_in": 60}), now=T0)
    [job] = fetch(now=T0)
    assert upkeep.expire(using=USING, now=T0 + 2 * MINUTE) == 0
    assert jobs.ack([Ack(jid=job.jid, wid="w1")], using=USING) == [True]


@pytest.mark.parametrize("state", ["enqueued", "scheduled", "retries"])
def test_the_sweep_drops_plain_jobs_and_keeps_tasks_as_expired(state):
    trait = {} if state == "enqueued" else {state: True}
    plain = JobFactory(**trait, expires_at=T0)
    kept = JobFactory(**trait, expires_at=T0, result_ttl=60)
    later = JobFactory(**trait, expires_at=T0 + MINUTE)
    never = JobFactory(**trait)
    now = T0 + timedelta(seconds=1)
    assert upkeep.expire(using=USING, now=now) == 2
    states = dict(Job.objects.values_list("pk", "state"))
    assert states == {kept.pk: "expired", later.pk: state, never.pk: state}
    assert plain.pk not in states
    row = Job.objects.get(pk=kept.pk)
    assert (row.finished_at, row.purge_at, row.run_at) == (now, now + MINUTE, None)


def test_the_sweep_goes_in_chunks():
    Job.objects.bulk_create(
        Job(jid=f"row-{n:08d}", jobtype="t", queue="q", state="enqueued", payload="{}", enqueued_at=T0, expires_at=T0)
        for n in range(5)
    )
    assert [upkeep.expire(using=USING, limit=2) for _ in range(4)] == [2, 2, 1, 0]


def test_a_thousand_expired_jobs_hold_up_none_behind_them():
    Job.objects.bulk_create(
        Job(jid=f"row-{n:08d}", jobtype="t", queue="default", state="enqueued", payload="{}", weight=-100,
            enqueued_at=T0, expires_at=T0)
        for n in range(1000)
    )  # fmt: skip
    job = payload()
    push(job)
    assert [got.jid for got in fetch()] == [job.jid]


def test_the_sweep_that_runs_every_second_looks_into_its_index_alone():
    over = Job.objects.in_state("enqueued", "scheduled", "retries").filter(expires_at__lte=T0).order_by("expires_at")
    with connection.cursor() as cursor, transaction.atomic():
        if connection.vendor == "postgresql":
            cursor.execute("SET LOCAL enable_seqscan = off")  # the table is empty
        assert "faktory_expiring" in over.explain()


def test_the_ends_of_the_calendar_are_no_error():
    custom = '{"unique_for":1e300,"expires_in":1e18}'
    text = f'{{"jid":"far-away","jobtype":"t","args":[],"at":"9999-12-30T00:00:00Z","custom":{custom}}}'
    assert push(parse_job(text)) == [True]
    assert Job.objects.get().unique_expires_at.year == 9999
