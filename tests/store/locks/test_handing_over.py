"""Acknowledge a job and fetch the next of its key together: the lock passes from one to the other (ADR 0015)."""

import threading
import time
from datetime import UTC, datetime

import pytest
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.limits import Allowance
from django_faktory.core.payloads import Ack, FetchRequest, WorkerIdentity
from django_faktory.errors import BrokerUnavailable
from django_faktory.models import Job, JobLock, WorkerProcess
from django_faktory.store.dialects import dialect_of
from django_faktory.store.dialects.postgresql.lock_handoff import LockHandoff
from django_faktory.store.jobs import exchanges
from django_faktory.store.limits import definitions
from django_faktory.store.notifier import publisher
from django_faktory.store.notifier.base import PollingListener
from django_faktory.store.statistics import counts
from tests.store.locks import tasks
from tests.store.locks.conftest import holders, jid, state_of
from tests.waiting import wait_until
from tests.worker.conftest import state, work  # noqa: F401  (fixtures)

pytestmark = pytest.mark.django_db(transaction=True)
on_postgresql = pytest.mark.skipif(
    "connection.vendor != 'postgresql'", reason="elsewhere the lock is taken in a transaction of its own"
)


def hand_over(node, job, *queues, wid="w1", count=1):
    """Acknowledge this job and fetch in the same exchange. If that returns no job, fetch again."""
    request = FetchRequest(queues=queues or ("default",), wid=wid, count=count)
    result = node.broker.exchange([], [Ack(jid=job.jid, wid=job.wid, attempt=job.attempt)], [request])
    assert result.acked == [True]
    return result.fetched[0] or node.broker.fetch([request])[0]


@pytest.fixture(params=["the usual way", "the fast way"] if connection.vendor == "postgresql" else ["the usual way"])
def one(node, request, monkeypatch):
    """A node. With the parameter "the fast way" it tries `LockHandoff` for each job."""
    if request.param == "the fast way":
        monkeypatch.setattr(LockHandoff, "expects", lambda *_: True)
    return node()


def chain(one):
    """Return the running job of a chain of hand-overs, behind which A3 and A4 wait."""
    one.push("A", "A1", "A2", "A3", "A4")
    job = one.reserve()
    for _ in range(2):  # the first end of a holder is a normal one, the second hands over
        [job] = hand_over(one, job)
    return job


def test_a_handoff_acquires_the_lock_with_a_new_token_and_lease(one):
    one.push("A", "A1", "A2")
    first = one.reserve()
    [second] = hand_over(one, first, wid="w2")
    assert second.jid == jid("A1")
    lock = JobLock.objects.get()
    assert (lock.pk, lock.jid, lock.wid, lock.attempt) == (second.lock_token, jid("A1"), "w2", second.attempt)
    assert lock.pk > first.lock_token
    assert not lock.is_lapsed
    assert (lock.expires_at - lock.acquired_at).total_seconds() == 35
    assert Job.objects.get(jid=jid("A1")).lock_token == second.lock_token
    assert state_of("A2") == "blocked"


def test_a_lock_without_waiting_jobs_is_released(one):
    one.push("A", "B")
    first = one.reserve()
    [other] = hand_over(one, first)
    assert other.jid == jid("B")
    assert holders() == [jid("B")]
    assert hand_over(one, other) == []
    assert holders() == []


def test_jobs_of_the_key_in_other_queues_stay_blocked_after_a_handoff(one):
    one.push("A")
    one.push("A1")
    one.push("A2", queue="other")
    first = one.reserve()
    assert [state_of("A1"), state_of("A2")] == ["blocked", "blocked"]
    [second] = hand_over(one, first)
    assert second.jid == jid("A1")
    assert state_of("A2") == "blocked"
    assert one.fetch("other") == []
    [third] = hand_over(one, second, "default", "other")
    assert third.jid == jid("A2")
    assert holders() == [jid("A2")]


def test_the_first_queue_of_the_request_decides_which_job_gets_the_lock(one):
    one.push("A")
    one.push("A1", queue="late")
    one.push("A2", queue="urgent")
    first = one.reserve()
    [second] = hand_over(one, first, "urgent", "late", count=2)
    assert second.jid == jid("A2")
    assert state_of("A1") == "blocked"
    assert holders() == [jid("A2")]
    assert [job.jid for job in hand_over(one, second, "urgent", "late", count=2)] == [jid("A1")]


def test_a_job_without_a_limiter_permit_does_not_acquire_the_lock(one):
    one.push("A")
    one.push("A1", jobtype="narrow", custom={"lock": "A"})
    one.push("B1", jobtype="narrow", custom={"lock": "A"})
    Job.objects.filter(jid=jid("A")).update(lock_key="A")
    definitions.save_limit("task", "narrow", Allowance(concurrency=1), using="default")
    one.push("N", jobtype="narrow", queue="elsewhere")
    in_the_way = one.reserve("elsewhere")
    first = one.reserve()
    assert hand_over(one, first) == []
    assert holders() == [jid("N")]
    assert one.broker.ack([Ack(jid=in_the_way.jid, wid="w1")]) == [True]
    assert one.fetch() == [jid("A1")]
    assert holders() == [jid("A1")]


def test_a_handoff_releases_the_unique_until_start_key_of_the_next_job(one):
    options = {"unique_for": 600, "unique_until": "start"}
    one.push("A")
    first = one.reserve()
    one.push("A1", custom=options, jobtype="noop")
    assert Job.objects.get(jid=jid("A1")).unique_key is not None
    [second] = hand_over(one, first)
    assert second.jid == jid("A1")
    assert Job.objects.get(jid=jid("A1")).unique_key is None


def test_a_late_ack_does_not_hand_the_lock_over(one):
    one.push("A", "A1")
    stale = one.reserve()
    one.broker.release([stale])
    holder = one.reserve(wid="w2")
    request = FetchRequest(queues=("default",), wid="w1")
    result = one.broker.exchange([], [Ack(jid=stale.jid, wid="w1", attempt=stale.attempt)], [request])
    assert (result.acked, result.fetched) == ([False], [[]])
    assert JobLock.objects.get().pk == holder.lock_token


@pytest.mark.parametrize("better", [{"queue": "first"}, {"priority": 9}])
def test_a_job_of_higher_priority_or_an_earlier_queue_is_fetched_first(one, better):
    one.push("A", "A1")
    holder = one.reserve()
    one.push("B", **better)
    [job] = hand_over(one, holder, "first", "default")
    assert job.jid == jid("B")
    assert state_of("A1") == "enqueued"
    assert one.fetch("first", "default") == [jid("A1")]


def test_a_preferred_job_in_a_paused_queue_does_not_prevent_the_handoff(one):
    one.push("A", "A1")
    holder = one.reserve()
    one.push("B", queue="first")
    one.broker.pause(["first"])
    [job] = hand_over(one, holder, "first", "default")
    assert job.jid == jid("A1")


def test_a_paused_queue_returns_no_job_in_an_exchange_with_an_ack(one):
    one.push("A", "A1")
    holder = one.reserve()
    one.broker.pause(["default"])
    assert hand_over(one, holder) == []
    assert holders() == []


def test_a_quiet_worker_does_not_get_the_next_job_of_the_key(one):
    one.broker.hello(WorkerIdentity(wid="tired", hostname="h", pid=1))
    WorkerProcess.objects.filter(wid="tired").update(state="quiet")
    one.push("A", "A1")
    assert hand_over(one, one.reserve(), wid="tired") == []
    assert one.fetch(wid="another") == [jid("A1")]


def test_the_result_of_an_ack_with_a_handoff_is_kept_and_counted(one):
    before = counts.read(using="default").totals["processed"]
    one.push("A", result_ttl=600)
    one.push("A1")
    holder = one.reserve()
    request = FetchRequest(queues=("default",), wid="w1")
    one.broker.exchange([], [Ack(jid=holder.jid, wid="w1", attempt=holder.attempt, result='"done"')], [request])
    kept = Job.objects.get(jid=jid("A"))
    assert (kept.state, kept.result, kept.lock_token, kept.reserved_until) == ("succeeded", '"done"', None, None)
    assert (kept.purge_at - kept.finished_at).total_seconds() == pytest.approx(600, abs=0.01)
    assert counts.read(using="default").totals["processed"] == before + 1


def test_an_expired_job_is_not_fetched_by_a_handoff(one):
    one.push("A", "A1")
    holder = one.reserve()
    Job.objects.filter(jid=jid("A1")).update(expires_at=datetime(2020, 1, 1, tzinfo=UTC))
    assert hand_over(one, holder) == []
    assert holders() == []


def test_a_job_claimed_by_a_handoff_is_stored_like_any_other_claim(one):
    one.push("A", "A1")
    holder = one.reserve()
    [job] = hand_over(one, holder, wid="w2")
    row = Job.objects.get(jid=jid("A1"))
    assert (row.state, row.wid, row.claims, row.enqueued_at) == ("working", "w2", 1, job.enqueued_at)
    assert (row.reserved_until - row.started_at).total_seconds() == pytest.approx(job.reserve_for, abs=0.01)
    assert (job.text, job.queue, job.attempt, job.lock_key) == (row.payload, "default", row.attempt, row.lock_key)
    assert row.claim is not None


def test_other_requests_of_the_exchange_get_the_remaining_jobs(one):
    one.push("A", "A1", "A2")
    holder = one.reserve()
    one.push("B", "C")
    requests = [FetchRequest(queues=("default",), wid=wid) for wid in ("w1", "w2", "w3", "w4")]
    result = one.broker.exchange([], [Ack(jid=holder.jid, wid="w1", attempt=holder.attempt)], requests)
    assert result.acked == [True]
    assert [[job.jid for job in found] for found in result.fetched] == [[jid("A1")], [jid("B")], [jid("C")], []]
    assert state_of("A2") == "blocked"


@on_postgresql
@pytest.mark.parametrize("before", [[], [FetchRequest(queues=("default",), count=0, prefetch=3)]])
def test_other_requests_in_a_handoff_chain_cost_nothing_without_ready_jobs(node, before):
    one = node()
    job = chain(one)
    requests = [*before, *(FetchRequest(queues=("default",), wid=wid) for wid in ("w1", "w2", "w3"))]
    with CaptureQueriesContext(connection) as sent:
        result = one.broker.exchange([], [Ack(jid=job.jid, wid="w1", attempt=job.attempt)], requests)
    assert result.acked == [True]
    assert [[job.jid for job in found] for found in result.fetched[len(before) :]] == [[jid("A3")], [], []]
    assert len([query for query in sent if "PREPARE" not in query["sql"]]) == 1


@on_postgresql
@pytest.mark.parametrize(("queue", "queues"), [("default", ("default",)), ("other", ("other", "default"))])
def test_other_requests_in_a_handoff_chain_get_the_ready_jobs(node, queue, queues):
    one = node()
    job = chain(one)
    one.push("B", queue=queue, priority=-9)
    requests = [FetchRequest(queues=("default",), wid="w1"), FetchRequest(queues=queues, wid="w2")]
    result = one.broker.exchange([], [Ack(jid=job.jid, wid="w1", attempt=job.attempt)], requests)
    assert [[job.jid for job in found] for found in result.fetched] == [[jid("A3")], [jid("B")]]


@on_postgresql
def test_a_fetch_of_several_jobs_gets_one_of_the_key_and_others(one):
    one.push("A", "A1", "A2")
    holder = one.reserve()
    one.push("B", "C")
    assert [job.jid for job in hand_over(one, holder, count=2)] == [jid("A1"), jid("B")]
    assert one.fetch(count=5) == [jid("C")]


@on_postgresql
def test_a_handoff_is_one_message_on_postgresql(one):
    if not dialect_of(connection).can_join(connection):
        pytest.skip("psycopg2 sends each call as a message")
    one.push("A", "A1")
    first = one.reserve()
    sent = []

    def listen_in(execute, sql, params, many, context):
        sent.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(listen_in):
        [second] = hand_over(one, first)
    assert second.lock_token
    assert len([sql for sql in sent if "PREPARE" not in sql.split("EXECUTE")[0]]) == 1, sent


def test_two_nodes_that_hand_off_the_same_keys_do_not_deadlock(node, caplog):
    rounds, nodes = 40, [node(), node()]
    both = threading.Barrier(2)
    lost, errors = [], []

    def client(me):
        try:
            both.wait(60)
            job, ends_at = None, time.monotonic() + 60
            while time.monotonic() < ends_at:
                if job is None:
                    [found] = me.broker.fetch([FetchRequest(queues=("default",), wid=f"w{id(me)}")])
                    job = found[0] if found else None
                else:
                    [job] = hand_over(me, job, wid=f"w{id(me)}") or [None]
                if not Job.objects.exists():
                    break
            if job is not None:
                lost.append(job)
        except Exception as error:  # noqa: BLE001  (reported to the test)
            errors.append(error)
        finally:
            connections.close_all()

    caplog.set_level("DEBUG", "django_faktory")
    nodes[0].push(*(f"{letter}{number}" for number in range(rounds) for letter in "AB"))
    threads = [threading.Thread(target=client, args=(one,)) for one in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert lost == []
    if connection.vendor == "postgresql":
        assert "collided" not in caplog.text
    assert (Job.objects.count(), JobLock.objects.count()) == (0, 0)


# --- our worker


@on_postgresql
def test_a_worker_fetches_the_next_job_of_a_key_with_its_ack(work, state, monkeypatch):  # noqa: F811
    handed, woken = [], []

    class Watched(OrmBroker):
        def exchange(self, jobs_, acks, requests):
            result = super().exchange(jobs_, acks, requests)
            handed.extend(job.jid for job in result.fetched[0])
            return result

    monkeypatch.setattr(publisher, "_local_receivers", [lambda _: [one.wake() for one in woken]])
    pages = [tasks.by_shop.enqueue(1, page) for page in range(10)]
    woken.append(work(Watched("default"), listen=PollingListener, poll_interval=600).worker)
    for job in pages:
        state(job, "succeeded")
    assert handed, "only the first may be fetched separately"
    assert handed == [job.id for job in pages if job.id in handed]


@on_postgresql
def test_jobs_of_a_handoff_with_a_lost_response_still_run(work, state, monkeypatch):  # noqa: F811
    lost = []
    real = exchanges.run

    def lossy(*args, **kwargs):
        result = real(*args, **kwargs)
        if not lost and isinstance(result, tuple) and result[1]:
            lost.append(result)
            raise BrokerUnavailable("database unavailable: the connection was lost")
        return result

    def some_are_done():
        pages = [tasks.by_shop.enqueue(1, page) for page in range(4)]
        for job in pages:
            state(job, "succeeded")
        return lost

    monkeypatch.setattr(exchanges, "run", lossy)
    work(OrmBroker("default"), poll_interval=0.05)
    wait_until(some_are_done, 60, what="one job was handed over: the worker was not fetching when another ended")
    assert holders() == []
