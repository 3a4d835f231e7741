"""Unique, expiring and tracked jobs over the wire, by raw bytes. Rules: W10, W12, W27."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, transaction

from django_faktory.core.limits import Allowance
from django_faktory.core.payloads import NewBatch, rfc3339
from django_faktory.core.steps import FOREVER
from django_faktory.models import Job, JobSignal
from django_faktory.store.batches import batches
from django_faktory.store.jobs import pushes
from django_faktory.store.limits import definitions
from django_faktory.store.store import Store
from tests.factories import JobFactory, payload
from tests.server.raw import push, worker
from tests.waiting import wait_until

UNIQUE = {"unique_for": 60}


def test_a_second_job_with_the_same_unique_key_is_answered_notunique(connect):
    client = connect()
    assert client.ask(push(jid="first-0001", custom=UNIQUE)) == b"+OK"
    assert client.ask(push(jid="second-001", custom=UNIQUE)) == b"-NOTUNIQUE Job not unique"
    assert client.ask(push(jid="first-0001", custom=UNIQUE)) == b"+OK"
    assert client.ask(push(jid="third-0001")) == b"+OK"


def test_pushb_reports_notunique_under_the_jid_of_the_job(connect):
    """W12: PUSHB reports the refusal under the job's jid."""
    client = connect()
    jobs = [{"jid": jid, "jobtype": "t", "args": [1], "custom": UNIQUE} for jid in ("first-0001", "second-001")]
    reply = client.ask("PUSHB " + json.dumps([*jobs, {"jid": "bad-00001"}]))
    assert json.loads(reply)["second-001"] == "NOTUNIQUE Job not unique"
    assert set(json.loads(reply)) == {"second-001", "bad-00001"}
    assert Job.objects.count() == 1


def test_only_one_of_several_concurrent_unique_pushes_is_accepted(connect):
    clients = [connect() for _ in range(8)]
    for number, client in enumerate(clients):
        client.send(push(jid=f"number-{number:04}", custom=UNIQUE))
    replies = sorted(client.reply() for client in clients)
    assert replies == [b"+OK"] + [b"-NOTUNIQUE Job not unique"] * 7


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer at a time")
@pytest.mark.parametrize("asks", ["key", "batch"])
def test_other_clients_proceed_while_pushes_wait_for_an_open_transaction(connect, asks):
    bid = batches.new(Store(), NewBatch(description="all", success=payload()))
    custom, expected = {"key": (UNIQUE, b"-NOTUNIQUE Job not unique"), "batch": ({"bid": bid}, b"+OK")}[asks]
    # InnoDB blocks an insert in front of a key that has a waiter, and all jobs without a key would be inserted there.
    JobFactory(working=True, unique_key="0" * 64, queue="other")
    producers, others, consumer = [connect() for _ in range(3)], [connect() for _ in range(3)], connect(**worker())
    with transaction.atomic():
        assert pushes.push(Store(), [payload(args=[1], jobtype="t", custom=custom)]) == [None]
        for number, producer in enumerate(producers):
            producer.send(push(jid=f"number-{number:04}", jobtype="t", args=[1], custom=custom))
        for number, other in enumerate(others):
            assert other.ask(push(jid=f"plain-{number:04}")) == b"+OK"
        assert json.loads(consumer.ask("FETCH default"))["jid"] == "plain-0000"
        assert consumer.ask('ACK {"jid":"plain-0000"}') == b"+OK"
    assert {producer.reply() for producer in producers} == {expected}


def test_an_invalid_job_option_is_refused_with_a_one_line_error(connect):
    client = connect()
    reply = client.ask(push(jid="job-00001", custom={"unique_for": "60"}))
    assert reply == b'-ERR custom.unique_for: expected a number of seconds above 0, got "60"'
    reply = client.ask(push(jid="job-00001", custom={"expires_in": 0}))
    assert reply == b"-ERR custom.expires_in: expected a number of seconds above 0, got 0"


def test_a_unique_lock_is_released_by_the_ack(connect):
    producer, consumer = connect(), connect(**worker())
    producer.ask(push(jid="first-0001", custom=UNIQUE))
    assert json.loads(consumer.ask("FETCH default"))["custom"] == UNIQUE
    assert producer.ask(push(jid="second-001", custom=UNIQUE)).startswith(b"-NOTUNIQUE")
    consumer.ask('ACK {"jid":"first-0001"}')
    assert producer.ask(push(jid="second-001", custom=UNIQUE)) == b"+OK"


def test_a_concurrency_limit_applies_to_plain_faktory_clients(connect):
    definitions.save_limit("key", "mail", Allowance(concurrency=1), using="default")
    producer, first, second = connect(), connect(**worker()), connect(**worker("w-second"))
    for jid in ("first-0001", "second-001"):
        assert producer.ask(push(jid=jid, custom={"limit": "mail"})) == b"+OK"
    assert json.loads(first.ask("FETCH default"))["jid"] == "first-0001"
    second.send("FETCH default")
    assert first.ask('ACK {"jid":"first-0001"}') == b"+OK"
    reply = second.reply() or wait_until(lambda: second.ask("FETCH default"))
    assert json.loads(reply)["jid"] == "second-001"


def test_a_limit_that_is_not_a_string_is_refused(connect):
    reply = connect().ask(push(jid="job-00001", custom={"limit": 5}))
    assert reply == b"-ERR custom.limit: expected a key, got 5"


def test_an_expired_job_is_not_fetched(connect):
    producer, consumer = connect(), connect(**worker())
    ago = rfc3339(datetime.now(UTC) - timedelta(seconds=1))
    assert producer.ask(push(jid="late-00001", custom={"expires_at": ago})) == b"+OK"
    assert producer.ask(push(jid="good-00001", custom={"expires_in": 60})) == b"+OK"
    assert json.loads(consumer.ask("FETCH default"))["jid"] == "good-00001"
    assert consumer.ask("FETCH default") is None


def test_a_job_is_tracked_from_push_to_ack(connect):
    producer, consumer = connect(), connect(**worker())
    assert producer.ask("TRACK GET job-00001") == b'{"jid":"job-00001","state":"unknown","updated_at":""}'
    producer.ask(push(jid="job-00001", custom={"track": 1}))
    assert json.loads(producer.ask("TRACK get job-00001"))["state"] == "enqueued"
    consumer.ask("FETCH default")
    assert consumer.ask('TRACK SET {"jid":"job-00001","percent":50,"desc":"half"}') == b"+OK"
    status = json.loads(producer.ask("TRACK GET job-00001"))
    assert (status["state"], status["percent"], status["desc"]) == ("working", 50, "half")
    consumer.ask('ACK {"jid":"job-00001"}')
    assert json.loads(producer.ask("TRACK GET job-00001"))["state"] == "success"


def test_another_worker_cannot_extend_a_reservation(connect):
    connect().ask(push(jid="job-00001"))
    holder, stranger = connect(**worker("wid-1")), connect(**worker("wid-2"))
    holder.ask("FETCH default")
    start = Job.objects.get().reserved_until
    until = rfc3339(datetime.now(UTC) + timedelta(hours=2))
    line = f'TRACK SET {{"jid":"job-00001","reserve_until":"{until}"}}'
    assert stranger.ask(line) == b"+OK"
    assert Job.objects.get().reserved_until == start
    assert holder.ask(line) == b"+OK"
    assert Job.objects.get().reserved_until > start


def test_an_invalid_track_command_leaves_the_connection_open(connect):
    client = connect()
    assert client.ask('TRACK SET {"jid":"job-00001","percent":101}').startswith(b"-ERR invalid TRACK SET: percent: ")
    assert client.ask("TRACK").startswith(b"-ERR invalid TRACK: ")
    assert client.ask("INFO").startswith(b"{")


def signal(jid, **members):
    return push(jid="signal-001", jobtype="approved", custom={"signals": jid}, **members)


def test_a_job_with_signals_is_stored_as_a_signal(connect):
    client = connect()
    assert client.ask(push(jid="waiting-01")) == b"+OK"
    assert client.ask(signal("waiting-01", args=[{"by": "ann", "n": 1.0}])) == b"+OK"
    assert client.ask(signal("waiting-01", args=[])) == b"+OK"
    assert [job.jid for job in Job.objects.all()] == ["waiting-01"]
    sent = [(one.name, one.payload) for one in JobSignal.objects.order_by("pk")]
    assert sent == [("approved", '{"by": "ann", "n": 1.0}'), ("approved", "null")]


def test_a_signal_wakes_the_job_that_waits_for_it(connect):
    JobFactory(jid="waiting-01", state="scheduled", run_at=FOREVER, enqueued_at=None, waits_for="approved")
    assert connect().ask(signal("waiting-01", args=[])) == b"+OK"
    wait_until(lambda: Job.objects.get().state == "enqueued")


def test_a_signal_to_no_job_or_to_an_ended_one_is_an_error(connect):
    client = connect()
    assert client.ask(signal("nothing-01", args=[])) == b"-ERR Job not found nothing-01"
    JobFactory(succeeded=True, jid="ended-0001")
    assert client.ask(signal("ended-0001", args=[])) == b"-ERR a job that is succeeded cannot take a signal"


def test_pushb_stores_jobs_beside_signals_and_names_the_signals_that_are_refused(connect):
    jobs = [{"jid": f"job-{name}", "jobtype": "t", "args": [1]} for name in ("one-1", "two-2")]
    jobs[1]["custom"] = {"signals": "nothing-01"}
    assert json.loads(connect().ask("PUSHB " + json.dumps(jobs))) == {"job-two-2": "Job not found nothing-01"}
    assert [job.jid for job in Job.objects.all()] == ["job-one-1"]
