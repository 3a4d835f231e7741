"""Claims under contention: no job twice, none lost, none locked that is not handed out."""

import threading

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_faktory.errors import BrokerUnavailable
from django_faktory.models import Job, WorkerProcess
from django_faktory.payloads import Ack, FetchRequest
from django_faktory.store import failures, jobs
from django_faktory.store.dialects import dialect_of
from django_faktory.store.dialects.pipeline import has_psycopg3
from tests.factories import JobFactory, QueueFactory, WorkerFactory, payload

pytestmark = pytest.mark.django_db(transaction=True)

USING = "default"


def in_threads(count, work):
    """Run `work(n)` in that many threads at once; the first error is raised here."""
    start, errors = threading.Barrier(count), []

    def run(number):
        try:
            start.wait(10)
            work(number)
        except Exception as error:  # noqa: BLE001 (handed to the test)
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


def test_six_workers_share_two_hundred_jobs_without_doubling_or_losing_one():
    jobs.push([payload(result_ttl=60) for _ in range(200)], using=USING)
    taken = [[] for _ in range(6)]

    def work(number):
        request = FetchRequest(queues=("default",), wid=f"w{number}", count=7)
        while got := jobs.fetch([request], using=USING)[0]:
            taken[number] += [job.jid for job in got]
            assert all(jobs.ack([Ack(jid=job.jid, wid=job.wid, attempt=job.attempt) for job in got], using=USING))

    in_threads(6, work)
    everything = [jid for mine in taken for jid in mine]
    assert len(everything) == len(set(everything)) == 200
    assert Job.objects.filter(state="succeeded", attempt=1).count() == 200


def test_requests_with_different_queues_compete_without_doubling():
    jobs.push([payload(queue=queue) for queue in "abc" for _ in range(30)], using=USING)
    taken = [[] for _ in range(4)]

    def work(number):
        requests = [FetchRequest(queues=tuple("abc"[n:] + "abc"[:n]), wid=f"w{number}-{n}") for n in range(3)]
        while any(found := jobs.fetch(requests, using=USING)):
            taken[number] += [job.jid for one in found for job in one]

    in_threads(4, work)
    everything = [jid for mine in taken for jid in mine]
    assert len(everything) == len(set(everything)) == 90


def test_a_push_repeated_by_four_senders_at_once_is_one_job():
    """W10."""
    same = [payload(f"same-{n}") for n in range(20)]
    in_threads(4, lambda number: jobs.push(same, using=USING))
    assert Job.objects.count() == 20


def test_one_fetch_for_many_workers_serves_each_in_its_turn():
    WorkerFactory(wid="quiet", state="quiet")
    first, second, third = payload(queue="a"), payload(queue="a"), payload(queue="b")
    jobs.push([first, second, third], using=USING)
    found = jobs.fetch(
        [
            FetchRequest(queues=("a",), wid="quiet"),
            FetchRequest(queues=("a", "b"), wid="w1"),
            FetchRequest(queues=("a", "b"), wid="w2"),
            FetchRequest(queues=("a", "b"), wid="w1"),
        ],
        using=USING,
    )
    assert [[(job.jid, job.wid) for job in one] for one in found] == [
        [],
        [(first.jid, "w1")],
        [(second.jid, "w2")],
        [(third.jid, "w1")],
    ]


def test_a_paused_queue_is_planned_around():
    QueueFactory(name="a", paused_at="2026-01-01T00:00:00Z")
    jobs.push([payload(queue="a"), payload(queue="b")], using=USING)
    found = jobs.fetch([FetchRequest(queues=("a", "b"), wid="w1"), FetchRequest(queues=("a",), wid="w2")], using=USING)
    assert [[job.queue for job in one] for one in found] == [["b"], []]


def test_two_workers_with_very_many_queues_each_are_served():
    """SQLite refuses a statement of more than 500 parts, and all that share a turn would have heard of it."""
    job = payload(queue="last")
    jobs.push([job], using=USING)
    requests = [FetchRequest(queues=(*(f"{wid}-{n}" for n in range(600)), "last"), wid=wid) for wid in ("w1", "w2")]
    found = jobs.fetch(requests, using=USING)
    assert [[one.jid for one in some] for some in found] == [[job.jid], []]


def test_one_database_statement_claims_a_set_on_postgresql():
    if connection.vendor != "postgresql" or not has_psycopg3():
        pytest.skip("a promise of the PostgreSQL dialect, with psycopg 3")

    def statements(verb, *args):
        with CaptureQueriesContext(connection) as told:
            found = verb(*args, using=USING)
        # A connection that was used before, as one of a pool, may prepare its statement now.
        return found, sum("PREPARE" not in one["sql"] for one in told)

    jobs.push([payload() for _ in range(20)], using=USING)
    [got], claims = statements(jobs.fetch, [FetchRequest(queues=("x", "default"), wid="w1", count=15)])
    ended, reports = statements(jobs.ack, [Ack(jid=job.jid) for job in got])
    _, pushes = statements(jobs.push, [payload() for _ in range(20)])
    assert len(ended) == 15
    assert (claims, reports, pushes) == (1, 1, 1)


def test_trouble_half_way_swallows_no_job_and_no_answer(monkeypatch):
    """W14: the first claim of two has committed when the second one cannot be made."""
    jobs.push([payload(queue="a"), payload(queue="c")], using=USING)
    requests = [FetchRequest(queues=("a", "b"), wid="w1"), FetchRequest(queues=("b", "c"), wid="w1")]

    def fails(*_):
        raise OperationalError("the server closed the connection unexpectedly")

    monkeypatch.setattr(dialect_of(connection), "waiting", fails, raising=False)
    told = jobs.exchange([payload(queue="z")], [], requests, using=USING)
    assert [[job.queue for job in one] for one in told.fetched] == [["a"], []]
    assert told.pushed == [None]
    jobs.push([payload(queue="a")], using=USING)
    assert [[job.queue for job in one] for one in jobs.fetch(requests, using=USING)] == [["a"], []]
    with pytest.raises(BrokerUnavailable):
        jobs.fetch(requests, using=USING)


def test_a_claim_locks_no_row_that_it_does_not_hand_out():
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("this database locks no rows")
    jobs.push([payload() for _ in range(4)] + [payload(queue="b")], using=USING)
    other = []

    def claim_the_rest(_):
        other.extend(jobs.fetch([FetchRequest(queues=("default", "b"), wid="w2", count=9)], using=USING)[0])

    with transaction.atomic():
        mine = jobs.fetch([FetchRequest(queues=("default", "b"), wid="w1", count=2)], using=USING)[0]
        in_threads(1, claim_the_rest)
    assert (len(mine), len(other)) == (2, 3)


def test_a_lost_worker_is_remembered_while_a_transaction_still_holds_its_job():
    """W20: what its dying transaction locks is passed over, and must be found by the next look."""
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("this database locks no rows")
    WorkerFactory(wid="gone")
    jobs.push([payload()], using=USING)
    jobs.fetch([FetchRequest(queues=("default",), wid="gone")], using=USING)
    with transaction.atomic():
        Job.objects.select_for_update().get()
        in_threads(1, lambda _: failures.lose(["gone"], using=USING))
    assert failures.lose(["gone"], using=USING) == 1
    assert Job.objects.get().state == "enqueued"
    assert not WorkerProcess.objects.exists()


def test_the_claim_walks_the_ready_index():
    if connection.vendor != "postgresql":
        pytest.skip("the plan is PostgreSQL's")
    JobFactory.create_batch(3)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(
            "EXPLAIN SELECT id FROM django_faktory_job WHERE state = 'enqueued' AND queue = 'q'"
            " ORDER BY weight, enqueued_at, id LIMIT 5"
        )
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "faktory_ready" in plan
    assert "Sort" not in plan


def test_ids_that_differ_in_case_or_trailing_space_are_different():
    jobs.push([payload("CaseJid"), payload("casejid"), payload("casejid ")], using=USING)
    assert Job.objects.count() == 3
    WorkerFactory(wid="W")
    assert not WorkerProcess.objects.filter(wid="w").exists()
