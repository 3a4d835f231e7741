"""A claim is undone if it was executed but its answer was lost: its number finds the jobs to release (ADR 0017)."""

import os
import threading

import pytest
from django.db import IntegrityError, connection

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.payloads import Ack, Beat, FetchRequest
from django_faktory.errors import BrokerUnavailable
from django_faktory.models import Job, JobLock
from django_faktory.store.jobs import claims as claiming
from django_faktory.store.jobs import exchanges, releases, unanswered_claims
from django_faktory.store.jobs.releases import release_claims
from django_faktory.store.jobs.unanswered_claims import CHECK_DELAYS_S, NUMBERS_PER_DRAW, RECHECK_DELAY_S, ClaimNumbers
from django_faktory.store.locks import locks
from django_faktory.store.store import Store
from tests.clocks import Clock
from tests.factories import payload

pytestmark = pytest.mark.django_db(transaction=True)

DEFAULT = FetchRequest(queues=("default",), wid="w1", count=5)


@pytest.fixture
def clock(monkeypatch):
    """The clock of the checks of unanswered claims; a test may set `clock.now`."""
    one = Clock()
    monkeypatch.setattr(unanswered_claims, "time", one)
    return one


@pytest.fixture
def broker(clock):
    return OrmBroker("default")


@pytest.fixture
def cut(monkeypatch):
    """`cut(module, "name")`: its next call is executed and committed, but its answer is lost."""

    def cut_one(module, name):
        real = getattr(module, name)

        def lossy(*args, **kwargs):
            monkeypatch.setattr(module, name, real)
            real(*args, **kwargs)
            raise BrokerUnavailable("database unavailable: the connection was lost")

        monkeypatch.setattr(module, name, lossy)

    return cut_one


def test_claim_numbers_are_never_drawn_twice():
    numbers = [ClaimNumbers().number() for _ in range(10 * NUMBERS_PER_DRAW)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 2**63 for number in numbers)


def test_a_forked_process_draws_different_claim_numbers():
    ClaimNumbers().number()  # also draws a batch of further numbers
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.write(theirs, b" ".join(b"%d" % ClaimNumbers().number() for _ in range(NUMBERS_PER_DRAW)))
        os._exit(0)
    os.waitpid(child, 0)
    drawn = set(map(int, os.read(ours, 64 * 1024).split()))
    os.close(ours)
    os.close(theirs)
    assert len(drawn) == NUMBERS_PER_DRAW
    assert drawn.isdisjoint(ClaimNumbers().number() for _ in range(NUMBERS_PER_DRAW))


def states():
    return sorted(Job.objects.values_list("state", flat=True))


def test_the_next_fetch_returns_jobs_of_a_fetch_with_lost_response(broker, cut):
    broker.push([payload(jid="first"), payload(jid="second")])
    ages = dict(Job.objects.values_list("jid", "enqueued_at"))
    cut(claiming, "run")
    with pytest.raises(BrokerUnavailable):
        broker.fetch([DEFAULT])
    assert states() == ["working", "working"]
    [found] = broker.fetch([DEFAULT])
    assert [job.jid for job in found] == ["job-first", "job-second"]
    assert {job.jid: job.enqueued_at for job in found} == ages


def test_releasing_an_unanswered_claim_keeps_other_jobs_of_the_worker(broker, cut):
    broker.push([payload(jid="held")])
    [[held]] = broker.fetch([DEFAULT])
    broker.push([payload(jid="lost")])
    cut(claiming, "run")
    with pytest.raises(BrokerUnavailable):
        broker.fetch([DEFAULT])
    [found] = broker.fetch([DEFAULT])
    assert [job.jid for job in found] == ["job-lost"]
    assert broker.ack([Ack(jid=held.jid, wid="w1", attempt=held.attempt)]) == [True]


def test_an_exchange_with_a_lost_response_loses_no_job(broker, cut):
    broker.push([payload(jid="first"), payload(jid="second")])
    [[first]] = broker.fetch([FetchRequest(queues=("default",), wid="w1")])
    cut(exchanges, "run")
    ack = Ack(jid=first.jid, wid="w1", attempt=first.attempt)
    with pytest.raises(BrokerUnavailable):
        broker.exchange([], [ack], [DEFAULT])
    assert states() == ["working"], "the first job is done, and the second is claimed"
    result = broker.exchange([payload(jid="third")], [ack], [DEFAULT])
    assert result.acked == [False], "it was acknowledged the first time"
    assert [job.jid for job in result.fetched[0]] == ["job-second", "job-third"]


def test_a_lock_acquired_by_a_fetch_with_a_lost_response_is_released(broker, cut):
    broker.push([payload(jid="first", custom={"lock": "one"}), payload(jid="second", custom={"lock": "one"})])
    # On PostgreSQL the claim acquires the lock.
    cut(*((claiming, "run") if connection.vendor == "postgresql" else (locks, "acquire_locks")))
    with pytest.raises(BrokerUnavailable):
        broker.fetch([DEFAULT])
    assert JobLock.objects.get().jid == "job-first"
    [[found]] = broker.fetch([DEFAULT])
    assert (found.jid, JobLock.objects.get().jid) == ("job-first", "job-first")


def test_a_heartbeat_also_releases_unanswered_claims(broker, cut):
    broker.push([payload(jid="first")])
    cut(claiming, "run")
    with pytest.raises(BrokerUnavailable):
        broker.fetch([DEFAULT])
    broker.beat([Beat(wid="w1")])
    assert states() == ["enqueued"]


def test_a_claim_executed_late_is_released_by_a_later_check(broker, clock, monkeypatch):
    numbers = []
    real = claiming.ClaimContext._claim

    def refused(self, plan):
        numbers.append(plan.claim)
        raise BrokerUnavailable("database unavailable")

    monkeypatch.setattr(claiming.ClaimContext, "_claim", refused)
    with pytest.raises(BrokerUnavailable):
        broker.fetch([DEFAULT])
    monkeypatch.setattr(claiming.ClaimContext, "_claim", real)
    broker.push([payload(jid="late")])
    broker.fetch([FetchRequest(queues=("other",), wid="w1")])
    [[late]] = claiming.fetch(Store(), [DEFAULT])
    Job.objects.filter(jid=late.jid).update(claim=numbers[0])  # the database was slow to execute the claim
    clock.now += CHECK_DELAYS_S[1]
    broker.fetch([FetchRequest(queues=("other",), wid="w1")])
    assert states() == ["enqueued"]


def test_a_claim_number_is_checked_three_times_and_then_dropped(clock):
    claims = ClaimNumbers()
    with pytest.raises(RuntimeError), claims.numbered() as number:
        raise RuntimeError
    for after_s in (0, 5, 25):
        clock.now += after_s
        assert claims.take_due() == [number]
        assert claims.take_due() == []
    clock.now += 1e6
    assert claims.take_due() == []


def test_each_claim_number_is_checked_by_one_thread_only():
    claims = ClaimNumbers()
    for _ in range(2000):
        with pytest.raises(RuntimeError), claims.numbered():
            raise RuntimeError
    taken, together = [], threading.Barrier(4)

    def acquire_locks():
        together.wait(60)
        taken.append(claims.take_due())

    threads = [threading.Thread(target=acquire_locks) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(taken) == 4
    assert len({number for numbers in taken for number in numbers}) == sum(map(len, taken)) == 2000


def test_a_failed_check_of_a_claim_number_is_repeated_and_not_counted(clock):
    claims = ClaimNumbers()
    with pytest.raises(RuntimeError), claims.numbered():
        raise RuntimeError
    looks = 0
    claims.retry_checks(claims.take_due())
    for _ in range(60):
        clock.now += 1
        looks += len(claims.take_due())
    assert looks == 3
    assert claims.take_due() == []


def test_a_claim_with_a_received_response_is_not_checked(broker):
    broker.push([payload(jid="first")])
    [[found]] = broker.fetch([DEFAULT])
    assert broker.claim_numbers.take_due() == []
    assert Job.objects.get(jid=found.jid).claim is not None


@pytest.mark.parametrize("error", [BrokerUnavailable("database unavailable"), IntegrityError("a\nb")])
def test_a_failed_check_of_unanswered_claims_is_retried_without_failing_the_fetch(
    broker, clock, cut, monkeypatch, caplog, error
):
    broker.push([payload(jid="first")])
    cut(claiming, "run")
    with pytest.raises(BrokerUnavailable):
        broker.fetch([DEFAULT])

    def refused(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(releases, "release_claims", refused)
        assert broker.fetch([DEFAULT]) == [[]]
    assert broker.fetch([DEFAULT]) == [[]], "not at once: the database may be in trouble"
    clock.now += RECHECK_DELAY_S
    [[found]] = broker.fetch([DEFAULT])
    assert found.jid == "job-first"


def test_finished_or_reclaimed_jobs_are_not_released_by_their_old_claim_number(broker):
    broker.push([payload(jid="ended", result_ttl=60), payload(jid="other")])
    [[ended, other]] = broker.fetch([DEFAULT])
    [number] = set(Job.objects.values_list("claim", flat=True))
    broker.ack([Ack(jid=ended.jid, wid="w1", attempt=ended.attempt)])
    broker.release([other])
    [[again]] = broker.fetch([DEFAULT])
    assert again.jid == "job-other"
    assert release_claims(Store(), [number]) == 0
