"""Unique jobs and jobs that expire: locks, races, the sweep, and the cost for other jobs. Rule: W27."""

from contextlib import nullcontext
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_faktory.core.job_parser import parse_job
from django_faktory.core.payloads import Ack, FetchRequest, failure, rfc3339
from django_faktory.errors import NotUnique
from django_faktory.models import Job, JobLock
from django_faktory.store.jobs import acknowledgements, claims, exchanges, failures, keyed_push, pushes
from django_faktory.store.maintenance import due
from django_faktory.store.store import Store
from tests.factories import T0, JobFactory, payload
from tests.server.test_fetch_index import calls
from tests.store import by_ids
from tests.store.jobs.test_claims import in_threads

pytestmark = pytest.mark.django_db(transaction=True)

USING = "default"
MINUTE = timedelta(minutes=1)


def unique(args=(1,), **fields):
    custom = {"unique_for": 600} | fields.pop("custom", {})
    return payload(args=args, custom=custom, **fields)


def push(*sent, now=None):
    """Return for each job whether it was accepted."""
    answers = pushes.push(Store(USING, now=now), sent)
    assert all(answer is None or isinstance(answer, NotUnique) for answer in answers)
    return [answer is None for answer in answers]


def fetch(*, now=None, count=1, wid="w1"):
    [found] = claims.fetch(Store(USING, now=now), [FetchRequest(queues=("default",), wid=wid, count=count)])
    return found


# --- the lock


@pytest.mark.parametrize(
    "other",
    [unique(args=[2]), unique(jobtype="other"), unique(queue="other"), unique(custom={"kwargs": {"a": 1}})],
    ids=["args", "jobtype", "queue", "kwargs"],
)
def test_jobs_with_a_different_unique_key_are_accepted(other):
    assert push(unique()) == [True]
    assert push(other) == [True]


def test_a_job_without_unique_for_is_accepted_despite_a_unique_lock():
    assert push(unique()) == [True]
    assert push(payload(args=[1])) == [True]


def test_the_unique_lock_expires_on_time_even_while_its_job_runs():
    assert push(unique(), now=T0) == [True]
    assert fetch(now=T0)
    assert push(unique(), now=T0 + 10 * MINUTE - timedelta(seconds=1)) == [False]
    assert push(unique(), now=T0 + 10 * MINUTE) == [True]
    assert Job.objects.filter(unique_key__isnull=False).count() == 1


def test_the_delay_of_a_scheduled_job_extends_its_unique_lock():
    assert push(unique(at=T0 + 60 * MINUTE), now=T0) == [True]
    assert push(unique(), now=T0 + 69 * MINUTE) == [False]
    assert push(unique(), now=T0 + 70 * MINUTE) == [True]


@pytest.mark.parametrize("kept", [None, 600], ids=["plain", "kept"])
def test_the_unique_lock_is_released_when_its_job_is_discarded_manually(kept):
    push(unique(result_ttl=kept))
    by_ids.discard([Job.objects.get().pk], using=USING)
    assert push(unique()) == [True]


@pytest.mark.parametrize("kept", [None, 600], ids=["plain", "kept"])
def test_success_discard_or_expiry_of_a_job_releases_its_unique_lock(kept):
    def report(job):
        return [failure(jid=job.jid, verdict="discard")]

    push(unique(result_ttl=kept))
    [job] = fetch()
    acknowledgements.ack(Store(USING), [Ack(jid=job.jid)])
    assert push(unique(result_ttl=kept)) == [True]
    [job] = fetch()
    failures.fail(Store(USING), report(job))
    assert push(unique(result_ttl=kept, custom={"expires_at": rfc3339(T0)})) == [True]
    assert due.expire(Store(USING)) == 1
    assert push(unique()) == [True]


def test_deleting_the_job_row_releases_its_unique_lock():
    push(unique())
    Job.objects.all().delete()
    assert push(unique()) == [True]


def test_a_dead_job_keeps_its_unique_lock_until_the_lock_expires():
    push(unique(retry=-1), now=T0)
    [job] = fetch(now=T0)
    failures.fail(Store(USING, now=T0), [failure(jid=job.jid)])
    assert Job.objects.get().state == "dead"
    assert push(unique(), now=T0 + MINUTE) == [False]
    assert push(unique(), now=T0 + 10 * MINUTE) == [True]


def test_a_dead_job_that_is_pushed_again_keeps_its_unique_lock():
    """W10: PUSH replaces the dead job, and the lock stays with its jid."""
    job = unique(retry=-1)
    push(job)
    [held] = fetch()
    failures.fail(Store(USING), [failure(jid=held.jid)])
    assert push(job) == [True]
    row = Job.objects.get()
    assert (row.state, row.failures) == ("enqueued", 0)
    assert push(unique()) == [False]


def test_a_plain_job_that_replaces_a_dead_unique_job_releases_the_lock():
    push(unique(jid="again", retry=-1))
    [held] = fetch()
    failures.fail(Store(USING), [failure(jid=held.jid)])
    assert push(payload("again", args=[1])) == [True]
    row = Job.objects.get()
    assert (row.state, row.unique_key, row.unique_expires_at, row.expires_at) == ("enqueued", None, None, None)


def test_pushing_a_live_jid_neither_acquires_a_unique_lock_nor_is_rejected():
    """W10: PUSH of a live jid changes nothing."""
    push(payload("lives", args=[1]))
    assert push(unique(jid="lives"), unique()) == [True, True]
    assert push(unique(jid="lives"), unique()) == [True, False]


def test_a_rejected_jid_that_occurs_twice_in_a_set_is_rejected_twice():
    push(unique())
    assert push(unique(jid="twin"), unique(jid="twin")) == [False, False]


def test_the_first_duplicate_in_a_set_wins_even_with_a_finished_jid():
    again, later = unique(), unique()
    JobFactory(succeeded=True, jid=again.jid)
    assert push(again, later) == [True, False]


def test_only_jobs_of_a_set_with_a_held_unique_lock_are_rejected():
    push(unique(args=[2]), now=T0)
    push(unique(args=[3]), now=T0 - 10 * MINUTE)
    assert push(*(unique(args=[number]) for number in (1, 2, 3, 1)), payload(), now=T0) == [
        True, False, True, False, True,
    ]  # fmt: skip


def test_a_large_set_accepts_one_job_for_each_of_700_unique_keys():
    assert push(*(unique(args=[number % 700]) for number in range(1400))) == [True] * 700 + [False] * 700


def test_a_unique_until_start_lock_is_not_reacquired_after_a_failure():
    push(unique(custom={"unique_until": "start"}))
    [job] = fetch()
    failures.fail(Store(USING), [failure(jid=job.jid)])
    assert Job.objects.get().unique_key is None
    assert push(unique()) == [True]


# --- races


def test_exactly_one_of_six_concurrent_pushes_of_a_unique_job_is_accepted():
    taken = []

    def work(number):
        for round_ in range(5):
            taken.extend((round_, was_taken) for was_taken in push(unique(args=[round_])))

    in_threads(6, work)
    assert sorted(round_ for round_, was_taken in taken if was_taken) == [0, 1, 2, 3, 4]
    assert len(taken) == 30
    assert Job.objects.count() == 5


def test_concurrent_sets_with_unique_keys_in_reverse_order_do_not_deadlock():
    taken = []

    def work(number):
        kinds = list(range(40))
        taken.append(push(*(unique(args=[kind]) for kind in (kinds if number % 2 else reversed(kinds)))))

    in_threads(4, work)
    assert sum(was_taken for answers in taken for was_taken in answers) == 40
    assert Job.objects.count() == 40


def test_concurrent_pushes_of_one_unique_jid_store_one_job_and_all_succeed():
    job = unique()
    answers = []
    in_threads(6, lambda _: answers.extend(push(job)))
    assert answers == [True] * 6
    assert Job.objects.count() == 1


@pytest.mark.skipif("connection.vendor != 'mysql'", reason="SQLite has one writer at a time, PostgreSQL one statement")
def test_a_unique_lock_acquired_after_the_first_check_is_detected(monkeypatch):
    """Another node commits between the look and the insert; the job's jid has a finished row."""
    looks, look = [], keyed_push._find_holders

    def look_and_lose(here, keys):
        found = look(here, keys)
        looks.append(len(found))
        if len(looks) == 1:
            in_threads(1, lambda _: push(unique()))
        return found

    monkeypatch.setattr(keyed_push, "_find_holders", look_and_lose)
    again = unique(result_ttl=60)
    JobFactory(succeeded=True, jid=again.jid)
    assert push(again) == [False]
    assert (looks[0], looks[-1]) == (0, 1)


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="a snapshot that does not see the other's row")
def test_a_duplicate_is_rejected_without_error_in_a_repeatable_read_transaction():
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute(f"SELECT COUNT(*) FROM {Job._meta.db_table}")
        in_threads(1, lambda _: push(unique()))
        assert push(unique(), unique(args=[2])) == [False, True]
    assert Job.objects.count() == 2


def test_a_rollback_undoes_the_job_and_its_unique_lock():
    with transaction.atomic():
        push(unique())
        transaction.set_rollback(True)
    assert push(unique()) == [True]


# --- push in one statement

on_postgresql = pytest.mark.skipif("connection.vendor != 'postgresql'", reason="PostgreSQL has it in one statement")

WISHES = {
    "expires in": {"expires_in": 60.25},
    "expires far away": {"expires_in": 1e18},
    "expires at": {"expires_at": rfc3339(T0 + MINUTE)},
    "earlier of two": {"expires_at": rfc3339(T0 + MINUTE), "expires_in": 3600},
    "limit": {"limit": "host:example.org"},
    "about": {"about": "app.thing/12"},
    "lock": {"lock": "a key"},
    "unique": {"unique_for": 600.5},
    "unique until its start": {"unique_for": 1e300, "unique_until": "start"},
    "all": {"unique_for": 60, "expires_in": 600, "lock": "a key", "limit": "other", "about": "app.thing/a b"},
}
FIELDS = {
    "plain": {},
    "set": {"queue": "q", "priority": -7, "retry": 3, "reserve_for": 60, "backtrace": 5, "result_ttl": 9},
    "later": {"at": T0 + 60 * MINUTE},
    "past": {"at": T0 - 60 * MINUTE},
}


def row(jid):
    found = Job.objects.filter(jid=jid).values().get()
    return {name: value for name, value in found.items() if name not in ("id", "jid", "payload")}


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("wish", WISHES)
def test_a_push_with_lookups_stores_a_job_identically(wish, fields):
    job = payload(args=["é\u2028", {"a": 1}], custom=WISHES[wish], **FIELDS[fields])
    push(job, now=T0)
    expected = row(job.jid)
    assert Job.objects.get().payload == job.text
    Job.objects.all().delete()
    assert keyed_push.push(connection, [(0, job)], T0) == {}
    assert row(job.jid) == expected


@pytest.mark.skipif("connection.vendor != 'sqlite'", reason="drivers of servers make calls of their own")
def test_a_push_with_lookups_takes_at_most_150_calls_for_each_job():
    """Check that its transaction is short: SQLite's other writers wait for it."""
    push(unique(args=["first"]))
    jobs = [(place, unique(args=[place])) for place in range(400)]
    assert calls(lambda: keyed_push.push(connection, jobs, T0)) < 150 * len(jobs)
    assert Job.objects.count() == 401


@on_postgresql
@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("is_within", [False, True], ids=["alone", "in a transaction"])
def test_a_job_with_options_is_pushed_by_one_statement(wish, is_within):
    with transaction.atomic() if is_within else nullcontext(), CaptureQueriesContext(connection) as captured:
        push(payload(custom=WISHES[wish]))
    assert len(captured) == 1


@on_postgresql
def test_rejecting_a_duplicate_unique_job_takes_one_statement():
    assert push(unique()) == [True]
    with CaptureQueriesContext(connection) as captured:
        assert push(unique()) == [False]
    assert len(captured) == 1


@on_postgresql
def test_a_set_with_unique_keys_takes_one_statement():
    with CaptureQueriesContext(connection) as captured:
        push(*(unique(args=[number]) for number in range(100)), payload())
    assert len(captured) == 1


@pytest.mark.parametrize("wish", ["expires in", "lock", "unique"])
def test_jobs_with_options_are_fetched_in_push_order(wish):
    sent = [payload(jid=f"{9 - n}", args=[n], custom=WISHES[wish] if n % 3 else {}) for n in range(9)]
    answers = push(*sent)
    want = [job.jid for job, was_taken in zip(sent, answers, strict=True) if was_taken]
    got = []
    while found := fetch(count=9):
        got += [job.jid for job in found]
        acknowledgements.ack(Store(USING), [Ack(jid=job.jid, wid="w1", attempt=job.attempt) for job in found])
    if wish == "lock":  # only one job of the key is ready at a time
        plain, locked = want[::3], [jid for n, jid in enumerate(want) if n % 3]
        assert [jid for jid in got if jid in plain] == plain
        assert [jid for jid in got if jid in locked] == locked
    else:
        assert got == want


@pytest.mark.parametrize("wish", ["expires in", "lock", "about", "unique"])
def test_a_push_of_the_jid_of_an_ended_job_stores_a_new_job(wish):
    """W10: the old result is that of another run."""
    job = payload(custom=WISHES[wish])
    JobFactory(succeeded=True, jid=job.jid, result="1")
    push(job)
    found = Job.live.get()
    assert (found.state, found.result, found.result_ttl) == ("enqueued", None, None)
    assert Job.objects.succeeded().get().result == "1"


@pytest.mark.parametrize("wish", ["expires in", "lock", "about", "unique"])
@pytest.mark.parametrize("state", ["enqueued", "blocked", "scheduled", "retries", "working"])
def test_a_push_of_a_live_job_with_options_changes_nothing(wish, state):
    """W10: PUSH of a live jid changes nothing."""
    job = payload(custom=WISHES[wish])
    JobFactory(jid=job.jid, **({} if state == "enqueued" else {state: True}))
    before = row(job.jid)
    assert push(job) == [True]
    assert row(job.jid) == before


@pytest.mark.parametrize("wish", ["expires in", "lock", "about", "unique"])
def test_a_push_does_not_replace_a_dead_batch_member(wish):
    job = payload(custom=WISHES[wish])
    JobFactory(dead=True, jid=job.jid, bid="b-unknown")
    push(job)
    assert Job.objects.get().state == "dead"


# --- locks


def states():
    return list(Job.objects.order_by("enqueued_at", "id").values_list("state", flat=True))


def locked(key="key", **fields):
    return payload(custom={"lock": key}, **fields)


def test_the_first_job_of_a_key_per_queue_and_priority_is_ready():
    push(locked(), locked(), locked(queue="other"), locked(priority=1), locked(priority=1), locked("free"))
    assert states() == ["enqueued", "blocked", "enqueued", "enqueued", "blocked", "enqueued"]


def test_a_job_pushed_behind_a_ready_job_of_its_key_is_blocked():
    push(locked())
    push(locked(), locked(queue="other"), payload())
    assert states() == ["enqueued", "blocked", "enqueued", "enqueued"]


def test_a_pushed_job_is_blocked_only_until_the_held_lock_expires():
    push(locked())
    assert fetch()
    push(locked())
    assert states() == ["working", "blocked"]
    JobLock.objects.update(expires_at=T0)
    push(locked(queue="other"))
    assert states() == ["working", "blocked", "enqueued"]


def test_a_scheduled_job_does_not_block_another_job_of_its_lock_key():
    push(locked(at=T0 + 60 * MINUTE), locked(), now=T0)
    assert dict(Job.objects.values_list("state", "run_at")) == {"scheduled": T0 + 60 * MINUTE, "enqueued": None}


def test_a_job_is_ready_if_the_first_of_its_set_already_exists():
    job = locked()
    JobFactory(scheduled=True, jid=job.jid)
    push(job, locked())
    assert sorted(states()) == ["enqueued", "scheduled"]


def test_all_40_concurrently_pushed_jobs_of_one_lock_key_are_fetched():
    in_threads(4, lambda _: [push(locked()) for _ in range(10)])
    got = []
    while found := fetch(count=9):
        got += [job.jid for job in found]
        acknowledgements.ack(Store(USING), [Ack(jid=job.jid, wid="w1", attempt=job.attempt) for job in found])
    assert len(got) == 40


# --- combined with fetches and acks


@pytest.mark.parametrize("wish", [wish for wish in WISHES if "expires_at" not in WISHES[wish]])
def test_jobs_pushed_in_an_exchange_can_be_fetched_in_the_same_exchange(wish):
    push(payload())
    [held] = fetch()
    sent = [payload(custom=WISHES[wish]), payload()]
    request = FetchRequest(queues=("default",), wid="w2", count=5)
    result = exchanges.exchange(Store(USING), sent, [Ack(jid=held.jid, wid="w1")], [request])
    assert (result.pushed, result.acked) == ([None, None], [True])
    assert [job.jid for job in result.fetched[0]] == [job.jid for job in sent]


def test_pushing_jobs_in_the_exchange_that_releases_their_lock_strands_none():
    push(locked())
    [held] = fetch()
    request = FetchRequest(queues=("default",), wid="w2", count=5)
    report = Ack(jid=held.jid, wid="w1", attempt=held.attempt)
    result = exchanges.exchange(Store(USING), [locked(), locked()], [report], [request])
    got = result.fetched[0] or fetch(wid="w2", count=5)
    assert (result.acked, len(got)) == ([True], 1)
    acknowledgements.ack(Store(USING), [Ack(jid=got[0].jid, wid="w2")])
    assert len(fetch()) == 1


# --- cost for jobs without options


def test_plain_jobs_are_pushed_by_one_statement():
    push(payload())
    with CaptureQueriesContext(connection) as captured:
        push(payload())
    statements = [query["sql"] for query in captured]
    assert len([sql for sql in statements if "INSERT" in sql or "faktory_push" in sql]) == 1
    assert not [sql for sql in statements if "SAVEPOINT" in sql or "BEGIN" in sql]


# --- expiry


def test_a_job_can_be_fetched_until_it_expires_and_not_after():
    push(payload(custom={"expires_in": 60}), payload(custom={"expires_in": 60}), now=T0)
    assert len(fetch(now=T0 + timedelta(seconds=59))) == 1
    assert fetch(now=T0 + timedelta(seconds=60)) == []


def test_expires_in_counts_from_the_scheduled_time():
    push(payload(at=T0 + 60 * MINUTE, custom={"expires_in": 60}), now=T0)
    assert Job.objects.get().expires_at == T0 + 61 * MINUTE


def test_the_earlier_of_expires_in_and_expires_at_applies():
    push(payload(custom={"expires_in": 60, "expires_at": rfc3339(T0 + 60 * MINUTE)}), now=T0)
    push(payload(custom={"expires_in": 600, "expires_at": rfc3339(T0 + MINUTE)}), now=T0)
    assert set(Job.objects.values_list("expires_at", flat=True)) == {T0 + MINUTE}


@pytest.mark.parametrize("state", ["scheduled", "retries"])
def test_a_job_that_expires_before_it_is_due_is_not_fetched(state):
    JobFactory(**{state: True}, expires_at=T0 + 30 * MINUTE, run_at=T0 + 60 * MINUTE)
    assert due.enqueue_due(Store(USING, now=T0 + 60 * MINUTE)) == {"default"}
    assert fetch(now=T0 + 60 * MINUTE) == []


def test_a_running_job_does_not_expire():
    push(payload(custom={"expires_in": 60}), now=T0)
    [job] = fetch(now=T0)
    assert due.expire(Store(USING, now=T0 + 2 * MINUTE)) == 0
    assert acknowledgements.ack(Store(USING), [Ack(jid=job.jid, wid="w1")]) == [True]


@pytest.mark.parametrize("state", ["enqueued", "scheduled", "retries"])
def test_the_expiry_sweep_deletes_only_jobs_without_a_result_ttl(state):
    trait = {} if state == "enqueued" else {state: True}
    plain = JobFactory(**trait, expires_at=T0)
    kept = JobFactory(**trait, expires_at=T0, result_ttl=60)
    later = JobFactory(**trait, expires_at=T0 + MINUTE)
    never = JobFactory(**trait)
    now = T0 + timedelta(seconds=1)
    assert due.expire(Store(USING, now=now)) == 2
    states = dict(Job.objects.values_list("pk", "state"))
    assert states == {kept.pk: "expired", later.pk: state, never.pk: state}
    assert plain.pk not in states
    row = Job.objects.get(pk=kept.pk)
    assert (row.finished_at, row.purge_at, row.run_at) == (now, now + MINUTE, None)


def test_the_expiry_sweep_processes_jobs_in_chunks():
    Job.objects.bulk_create(
        Job(jid=f"row-{n:08d}", jobtype="t", queue="q", state="enqueued", payload="{}", enqueued_at=T0, expires_at=T0)
        for n in range(5)
    )
    assert [due.expire(Store(USING), limit=2) for _ in range(4)] == [2, 2, 1, 0]


def test_a_thousand_expired_jobs_do_not_delay_the_job_behind_them():
    Job.objects.bulk_create(
        Job(jid=f"row-{n:08d}", jobtype="t", queue="default", state="enqueued", payload="{}", sort_priority=-100,
            enqueued_at=T0, expires_at=T0)
        for n in range(1000)
    )  # fmt: skip
    job = payload()
    push(job)
    assert [got.jid for got in fetch()] == [job.jid]


def test_the_expiry_sweep_uses_the_expiring_index():
    over = due.find_expired_jobs(Store(now=T0))
    with connection.cursor() as cursor, transaction.atomic():
        if connection.vendor == "postgresql":
            cursor.execute("SET LOCAL enable_seqscan = off")  # the table is empty
        assert "faktory_expiring" in over.explain()


def test_a_unique_lock_beyond_the_calendar_is_capped_at_year_9999():
    custom = '{"unique_for":1e300,"expires_in":1e18}'
    text = f'{{"jid":"far-away","jobtype":"t","args":[],"at":"9999-12-30T00:00:00Z","custom":{custom}}}'
    assert push(parse_job(text)) == [True]
    assert Job.objects.get().unique_expires_at.year == 9999
