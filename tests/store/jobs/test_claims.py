"""Claims under contention: no job is claimed twice or lost, and only claimed jobs are locked."""

import random
import threading

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_faktory.core.limits import Allowance
from django_faktory.core.payloads import Ack, FetchRequest, Reservation
from django_faktory.errors import BrokerUnavailable
from django_faktory.models import Job, WorkerProcess
from django_faktory.store.dialects import dialect_of
from django_faktory.store.dialects.postgresql.pipeline import has_psycopg3
from django_faktory.store.jobs import claims as claiming
from django_faktory.store.jobs import failures
from django_faktory.store.jobs.acknowledgements import ack
from django_faktory.store.jobs.claims import ClaimContext, distribute, fetch
from django_faktory.store.jobs.exchanges import exchange
from django_faktory.store.jobs.pushes import push
from django_faktory.store.limits import definitions
from django_faktory.store.store import Store
from tests.factories import JobFactory, QueueFactory, WorkerFactory, payload

pytestmark = pytest.mark.django_db(transaction=True)

USING = "default"


def in_threads(count, work):
    """Run `work(n)` in this many threads at once, and raise the first error of a thread."""
    start, errors = threading.Barrier(count), []

    def run(number):
        try:
            start.wait(60)
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


def test_six_concurrent_workers_claim_each_of_200_jobs_exactly_once():
    push(Store(USING), [payload(result_ttl=60) for _ in range(200)])
    taken = [[] for _ in range(6)]

    def work(number):
        request = FetchRequest(queues=("default",), wid=f"w{number}", count=7)
        while got := fetch(Store(USING), [request])[0]:
            taken[number] += [job.jid for job in got]
            assert all(ack(Store(USING), [Ack(jid=job.jid, wid=job.wid, attempt=job.attempt) for job in got]))

    in_threads(6, work)
    everything = [jid for mine in taken for jid in mine]
    assert len(everything) == len(set(everything)) == 200
    assert [job.claims for job in Job.objects.succeeded()] == [1] * 200


def test_concurrent_requests_with_different_queue_orders_claim_each_job_once():
    push(Store(USING), [payload(queue=queue) for queue in "abc" for _ in range(30)])
    taken = [[] for _ in range(4)]

    def work(number):
        requests = [FetchRequest(queues=tuple("abc"[n:] + "abc"[:n]), wid=f"w{number}-{n}") for n in range(3)]
        while any(found := fetch(Store(USING), requests)):
            taken[number] += [job.jid for one in found for job in one]

    in_threads(4, work)
    everything = [jid for mine in taken for jid in mine]
    assert len(everything) == len(set(everything)) == 90


def test_jobs_pushed_by_four_clients_concurrently_are_stored_once():
    """W10: each job is stored once, whichever sender comes first."""
    same = [payload(f"same-{n}") for n in range(20)]
    in_threads(4, lambda number: push(Store(USING), same))
    assert Job.objects.count() == 20


def test_one_fetch_for_several_workers_serves_them_in_request_order():
    WorkerFactory(wid="quiet", state="quiet")
    first, second, third = payload(queue="a"), payload(queue="a"), payload(queue="b")
    push(Store(USING), [first, second, third])
    found = fetch(
        Store(USING),
        [
            FetchRequest(queues=("a",), wid="quiet"),
            FetchRequest(queues=("a", "b"), wid="w1"),
            FetchRequest(queues=("a", "b"), wid="w2"),
            FetchRequest(queues=("a", "b"), wid="w1"),
        ],
    )
    assert [[(job.jid, job.wid) for job in one] for one in found] == [
        [],
        [(first.jid, "w1")],
        [(second.jid, "w2")],
        [(third.jid, "w1")],
    ]


WAYS = {
    "fetch": lambda requests: fetch(Store(USING), requests),
    "exchange": lambda requests: exchange(Store(USING), [payload(queue="pushed")], [], requests).fetched,
}


@pytest.fixture(params=WAYS)
def fetched(request):
    """Return a function that maps requests, as worker:queues, to the jids that each got."""

    def ask(*names):
        requests = [
            FetchRequest(queues=tuple(queues.split()), wid=wid)
            for wid, _, queues in (name.partition(":") for name in names)
        ]
        found = WAYS[request.param](requests)
        assert all(job.wid == asked.wid for asked, one in zip(requests, found, strict=True) for job in one)
        return [one[0].jid.strip(".") if one else "-" for one in found]

    return ask


def test_requests_are_served_in_order_regardless_of_which_queue_has_jobs(fetched):
    push(Store(USING), [payload("a1", queue="a"), payload("c1", queue="c"), payload("c2", queue="c")])
    asked = ["w1:b a", "w2:a b", "w1:c a", "w3:c", "w2:c a"]
    assert fetched(*asked) == ["job-a1", "-", "job-c1", "job-c2", "-"]


def test_a_quiet_worker_gets_no_job_and_other_requests_are_served(fetched):
    WorkerFactory(wid="quiet", state="quiet")
    push(Store(USING), [payload("a1", queue="a"), payload("a2", queue="a")])
    assert fetched("quiet:a b", "w1:b a", "quiet:a", "w2:a") == ["-", "job-a1", "-", "job-a2"]


@pytest.mark.parametrize("held_back_by", ["lock", "limit"])
def test_a_fetch_skips_a_job_held_back_by_a_lock_or_limit(fetched, held_back_by):
    if held_back_by == "lock":
        push(Store(USING), [payload(f"k{n}", queue="a", custom={"lock": "key"}) for n in range(3)])
    else:
        definitions.save_limit("task", "shut", Allowance.of({"concurrency": 1}), using=USING)
        push(Store(USING), [payload(f"k{n}", queue="a", jobtype="shut") for n in range(3)])
    [[holder]] = fetch(Store(USING), [FetchRequest(queues=("a",), wid="w0")])
    assert holder.jid.startswith("job-k0")
    push(Store(USING), [payload("free", queue="a"), payload("other", queue="b")])
    assert fetched("w1:a b", "w2:b a", "w3:b") == ["job-free", "job-other", "-"]


def test_claims_for_different_workers_are_one_message_on_postgresql(monkeypatch):
    if connection.vendor != "postgresql":
        pytest.skip("guaranteed by the PostgreSQL dialect")
    looks = []
    real = dialect_of(connection).count_ready
    dialect = dialect_of(connection)
    monkeypatch.setattr(
        dialect, "count_ready", lambda *args, **more: looks.append(1) or real(*args, **more), raising=False
    )

    def serve(count):
        push(Store(USING), [payload(queue="a") for _ in range(count)])
        requests = [FetchRequest(queues=("b", "a"), wid=f"w{n}") for n in range(count)]
        fetched = exchange(Store(USING), [], [], requests).fetched
        assert [len(one) for one in fetched] == [1] * count

    serve(claiming.MAX_REQUEST_CLAIMS)
    assert looks == []
    serve(claiming.MAX_REQUEST_CLAIMS + 1)
    assert looks, "for many requests it counts the ready jobs first"


def test_jobs_are_prefetched_for_several_workers_in_one_exchange():
    if not dialect_of(connection).supports_prefetch:
        pytest.skip("this database does not prefetch")
    push(Store(USING), [payload(f"a{n}", queue="a") for n in range(5)])
    candidate_wids = ("w1", "w2")
    requests = [
        FetchRequest(queues=("a", "b"), wid="w1", prefetch=2, candidate_wids=candidate_wids),
        FetchRequest(queues=("b", "a"), wid="w2"),
    ]
    fetched = exchange(Store(USING), [], [], requests).fetched
    assert [[job.jid.strip(".") for job in one] for one in fetched] == [["job-a0", "job-a2", "job-a3"], ["job-a1"]]
    assert [job.is_prefetched for job in fetched[0]] == [False, True, True]


def test_a_fetch_skips_a_paused_queue():
    QueueFactory(name="a", paused_at="2026-01-01T00:00:00Z")
    push(Store(USING), [payload(queue="a"), payload(queue="b")])
    found = fetch(Store(USING), [FetchRequest(queues=("a", "b"), wid="w1"), FetchRequest(queues=("a",), wid="w2")])
    assert [[job.queue for job in one] for one in found] == [["b"], []]


def test_two_workers_with_600_queues_each_are_served():
    """SQLite refuses a statement of more than 500 parts; the error would reach all requests of the exchange."""
    job = payload(queue="last")
    push(Store(USING), [job])
    requests = [FetchRequest(queues=(*(f"{wid}-{n}" for n in range(600)), "last"), wid=wid) for wid in ("w1", "w2")]
    found = fetch(Store(USING), requests)
    assert [[one.jid for one in some] for some in found] == [[job.jid], []]


def test_a_set_is_claimed_acked_or_pushed_by_one_statement_on_postgresql():
    if connection.vendor != "postgresql" or not has_psycopg3():
        pytest.skip("guaranteed by the PostgreSQL dialect, with psycopg 3")

    def statements(verb, *args):
        with CaptureQueriesContext(connection) as queries:
            found = verb(Store(USING), *args)
        # a connection from a pool, used before, may prepare its statement now
        return found, sum("PREPARE" not in one["sql"] for one in queries)

    push(Store(USING), [payload() for _ in range(20)])
    [got], claims = statements(fetch, [FetchRequest(queues=("x", "default"), wid="w1", count=15)])
    ended, reports = statements(ack, [Ack(jid=job.jid) for job in got])
    _, pushes = statements(push, [payload() for _ in range(20)])
    assert len(ended) == 15
    assert (claims, reports, pushes) == (1, 1, 1)


def test_an_error_between_two_claims_loses_no_job_and_no_answer(monkeypatch):
    """W14: the first of two claims has committed when the second one fails."""
    push(Store(USING), [payload(queue="a"), payload(queue="c")])
    requests = [FetchRequest(queues=("a", "b"), wid="w1"), FetchRequest(queues=("b", "c"), wid="w1")]
    # Fewer requests would make both claims in one message.
    requests += [FetchRequest(queues=(f"empty{n}",), wid="w1") for n in range(claiming.MAX_REQUEST_CLAIMS - 1)]

    def fails(*_, **__):
        raise OperationalError("the server closed the connection unexpectedly")

    monkeypatch.setattr(dialect_of(connection), "count_ready", fails, raising=False)
    result = exchange(Store(USING), [payload(queue="z")], [], requests)
    assert [[job.queue for job in one] for one in result.fetched] == [["a"], *[[]] * claiming.MAX_REQUEST_CLAIMS]
    assert result.pushed == [None]
    push(Store(USING), [payload(queue="a")])
    fetched = fetch(Store(USING), requests)
    assert [[job.queue for job in one] for one in fetched] == [["a"], *[[]] * claiming.MAX_REQUEST_CLAIMS]
    with pytest.raises(BrokerUnavailable):
        fetch(Store(USING), requests)


def test_a_claim_locks_only_the_rows_that_it_returns():
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("this database locks no rows")
    push(Store(USING), [payload() for _ in range(4)] + [payload(queue="b")])
    if connection.vendor == "mysql":
        # MariaDB counts rows in the background. With the counts of an earlier table it may sort, and lock all rows.
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE TABLE django_faktory_job")
    other = []

    def claim_the_rest(_):
        other.extend(fetch(Store(USING), [FetchRequest(queues=("default", "b"), wid="w2", count=9)])[0])

    with transaction.atomic():
        mine = fetch(Store(USING), [FetchRequest(queues=("default", "b"), wid="w1", count=2)])[0]
        in_threads(1, claim_the_rest)
    assert (len(mine), len(other)) == (2, 3)


@pytest.mark.skipif(connection.vendor != "postgresql", reason="about the log of PostgreSQL")
def test_a_claim_writes_no_payload_to_the_log():
    values = [["default"], [10], "w1", 10, 1, 60.0, None, 60.0, None, False, ["default"], [-101], ["-infinity"], [101]]
    claim = (
        "SELECT * FROM faktory_claim_1(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s::smallint[], %s::timestamptz[],"
    )
    for number in range(5):
        push(Store(), [payload(f"job-{number}-{place}", args=["x" * 600]) for place in range(10)])
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN (ANALYZE, WAL, FORMAT JSON) {claim} %s::smallint[], NULL)", values)
            [[[explained]]] = cursor.fetchall()
        plan = explained["Plan"]
        if not plan["WAL FPI"]:  # after a checkpoint, the first change of a page logs all of it
            break
    assert Job.live.working().count() == 10 * (number + 1)
    assert plan["WAL Bytes"] < 10 * 600


def test_a_lost_worker_row_is_kept_while_a_transaction_locks_its_job():
    """W20: a job locked by the worker's dying transaction is skipped, and the next look must find it."""
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("this database locks no rows")
    WorkerFactory(wid="gone")
    push(Store(USING), [payload()])
    fetch(Store(USING), [FetchRequest(queues=("default",), wid="gone")])
    with transaction.atomic():
        Job.objects.select_for_update().get()
        in_threads(1, lambda _: failures.reclaim_lost(Store(USING), ["gone"]))
    assert failures.reclaim_lost(Store(USING), ["gone"]) == 1
    assert Job.objects.get().state == "enqueued"
    assert not WorkerProcess.objects.exists()


def test_a_worker_that_resumes_during_its_reclaim_loses_its_jobs_once(monkeypatch):
    """A process that was suspended may claim the reclaimed jobs at once; a third loss would make them dead."""
    WorkerFactory(wid="frozen")
    push(Store(USING), [payload()])
    fetch(Store(USING), [FetchRequest(queues=("default",), wid="frozen")])
    run = failures.run

    def run_and_resume(*args, **options):
        result = run(*args, **options)
        fetch(Store(USING), [FetchRequest(queues=("default",), wid="frozen")])
        return result

    monkeypatch.setattr(failures, "run", run_and_resume)
    assert failures.reclaim_lost(Store(USING), ["frozen"]) == 1
    job = Job.objects.get()
    assert (job.state, job.wid, job.losses) == ("working", "frozen", 1)
    assert WorkerProcess.objects.exists()


def test_the_claim_query_uses_the_ready_index_without_a_sort():
    if connection.vendor != "postgresql":
        pytest.skip("the plan is PostgreSQL's")
    JobFactory.create_batch(3)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(
            "EXPLAIN SELECT id FROM django_faktory_job WHERE state = 'enqueued' AND queue = 'q'"
            " ORDER BY sort_priority, enqueued_at, id LIMIT 5"
        )
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "faktory_ready" in plan
    assert "Sort" not in plan


def test_ids_that_differ_in_case_or_trailing_space_are_different():
    push(Store(USING), [payload("CaseJid"), payload("casejid"), payload("casejid ")])
    assert Job.objects.count() == 3
    WorkerFactory(wid="W")
    assert not WorkerProcess.objects.filter(wid="w").exists()


def together(wid, *wishes):
    """Return requests of one worker; each letter names a queue."""
    return [FetchRequest(queues=tuple(wish), wid=wid) for wish in wishes]


def test_a_job_pushed_between_two_claims_does_not_displace_the_first_claim():
    """Each statement of PostgreSQL sees all commits before it: queue b was empty for the first claim."""
    for name in "ab":
        JobFactory(jid=f"job-in-{name}", queue=name, working=True)
    requests = together("w1", "ba", "b")
    claiming = ClaimContext(Store(), 35.0)
    claimed = [Reservation(jid=f"job-in-{name}", queue=name, text="", wid="w1", attempt=1) for name in "ab"]
    dealt = distribute(requests, claimed, claiming, has_committed_work=True, is_all=True)
    assert [[job.queue for job in jobs] for jobs in dealt] == [["a"], ["b"]]


def test_a_claimed_job_that_matches_no_request_is_released():
    row = JobFactory(jid="job-in-c", queue="c", working=True)
    claiming = ClaimContext(Store(), 35.0)
    claimed = [Reservation(jid=row.jid, queue="c", text="", wid="w1", attempt=1)]
    assert distribute(together("w1", "a", "b"), claimed, claiming) == [[], []]
    row.refresh_from_db()
    assert (row.state, row.wid) == ("enqueued", "")


def test_jobs_pushed_during_concurrent_exchanges_are_all_claimed():
    pushed, got, is_over = [], [], threading.Event()

    def work(number):
        if number:
            for name in random.choices("abc", k=600):
                job = payload(queue=name)
                push(Store(USING), [job])
                pushed.append(job.jid)
            is_over.set()
            return
        while not is_over.is_set() or Job.objects.in_state("enqueued").exists():
            requests = together("w1", *(random.sample("abc", random.randint(1, 3)) for _ in range(4)))
            result = exchange(Store(USING), [], [Ack(jid=jid, wid="w1") for jid in got[-4:]], requests)
            got.extend(job.jid for found in result.fetched for job in found)

    in_threads(2, work)
    assert sorted(got) == sorted(pushed)


def test_a_fetch_of_1000_queues_takes_at_most_20_statements():
    """On SQLite and MariaDB it used to take one for each queue, in the transaction that writes."""
    queues = tuple(f"queue-{number:04d}" for number in range(1000))
    JobFactory(queue=queues[700])
    JobFactory(queue=queues[300], jid="the-first-one")
    with CaptureQueriesContext(connection) as statements:
        [[got]] = claiming.fetch(Store(USING), [FetchRequest(queues=queues, wid="w")])
    assert got.jid == "the-first-one"
    assert len(statements) <= 20
