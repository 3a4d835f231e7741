"""A client that disconnects during a FETCH loses no job. Rule: W14."""

import json
import socket
import struct
import threading

import pytest

from django_faktory.brokers.orm import OrmBroker
from django_faktory.errors import BrokerUnavailable
from django_faktory.models import Job
from tests.server.raw import RawClient, over_both, push, worker
from tests.waiting import wait_until

pytestmark = pytest.mark.once


class Slow(OrmBroker):
    """OrmBroker that returns claims only when the test allows it, and raises `release_errors` from `release`.

    With `delays_empty_claims`, claims that found no job are delayed too.
    """

    def __init__(self):
        super().__init__("default")
        self.may_return = threading.Event()
        self.has_claimed = threading.Event()
        self.release_errors = []
        self.delays_empty_claims = False

    def fetch(self, requests):
        found = super().fetch(requests)
        if any(found) or self.delays_empty_claims:
            self.has_claimed.set()
            assert self.may_return.wait(60)
        return found

    def release(self, reservations):
        if self.release_errors:
            raise self.release_errors.pop()
        return super().release(reservations)


@pytest.fixture
def broker():
    return Slow()


@pytest.fixture
def slow(serve, broker):
    return serve(broker)


def reset(client):
    """Close the socket so that the peer receives a reset."""
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def is_back():
    return Job.objects.filter(state="enqueued", wid="").exists()


@over_both
@pytest.mark.parametrize("leave", [RawClient.close, reset, lambda client: client.socket.shutdown(socket.SHUT_WR)])
def test_a_job_claimed_for_a_disconnected_client_is_delivered_to_another(slow, broker, leave):
    leaver, producer, stays = (RawClient.identified(slow.address, **worker(wid)) for wid in ("gone", "p", "stays"))
    producer.ask(push(jid="abcdefgh"))
    leaver.send("FETCH default")
    assert broker.has_claimed.wait(60)
    leave(leaver)
    wait_until(lambda: "gone" not in slow._by_wid)
    stays.send("FETCH default")
    broker.may_return.set()
    assert json.loads(stays.reply())["jid"] == "abcdefgh"
    for one in (leaver, producer, stays):
        one.close()


@pytest.mark.tuning(release_again_s=0.01)
@pytest.mark.parametrize("times", [1, 2])
def test_a_release_is_retried_after_a_database_outage(slow, broker, times):
    broker.release_errors = [BrokerUnavailable("no route to host")] * times
    leaver, producer = (RawClient.identified(slow.address, **worker(wid)) for wid in ("gone", "p"))
    producer.ask(push(jid="abcdefgh"))
    leaver.send("FETCH default")
    assert broker.has_claimed.wait(60)
    leaver.close()
    wait_until(lambda: "gone" not in slow._by_wid)
    broker.may_return.set()
    wait_until(is_back)
    producer.close()


def test_a_release_that_raises_is_logged_and_the_server_continues(slow, broker, caplog):
    broker.release_errors = [RuntimeError("this job chokes the broker")]
    leaver, producer = (RawClient.identified(slow.address, **worker(wid)) for wid in ("gone", "p"))
    producer.ask(push(jid="abcdefgh"))
    leaver.send("FETCH default")
    assert broker.has_claimed.wait(60)
    leaver.close()
    wait_until(lambda: "gone" not in slow._by_wid)
    broker.may_return.set()
    wait_until(lambda: "jobs not released" in caplog.text)
    assert producer.ask("INFO")
    producer.close()


def test_a_fetch_that_starts_after_a_half_close_takes_no_job(connect, server):
    """A client that has ended its half cannot be distinguished from one that has disconnected."""
    connect().ask(push(jid="abcdefgh"))
    gone = connect(**worker("gone"))
    gone.send('BEAT {"wid":"gone"}\r\nFETCH default')
    gone.socket.shutdown(socket.SHUT_WR)
    assert (gone.reply(), gone.reply()) == (b"+OK", None)
    assert gone.is_closed()
    assert Job.objects.get().state == "enqueued"


def test_commands_queued_after_a_waiting_fetch_are_answered_after_a_half_close(connect, server):
    client = connect(**worker())
    client.send("FETCH default\r\n" + push(jid="abcdefgh"))
    wait_until(lambda: len(server.fetch_queue._waiting) == 1)
    client.socket.shutdown(socket.SHUT_WR)
    assert (client.reply(), client.reply()) == (None, b"+OK")
    assert client.is_closed()
    assert Job.objects.get().jid == "abcdefgh"


@over_both
def test_a_job_is_released_if_its_reply_cannot_be_written(connect, server):
    """The bytes behind the FETCH stop the server from reading, so that only a write detects the reset."""
    gone, producer = connect(**worker("gone")), connect()
    gone.send("FETCH default\r\n" + "x" * 300_000)
    wait_until(lambda: len(server.fetch_queue._waiting) == 1)
    (place,) = server._by_wid["gone"]
    wait_until(lambda: place._is_reading_paused)
    reset(gone)
    producer.ask(push(jid="abcdefgh"))
    wait_until(is_back)


def fetch_without_reading(server, wid="deaf"):
    """Send FETCH and return the client while part of its reply is unsent: the reply exceeds the system's socket
    buffers.
    """
    client = RawClient.identified(server.address, **worker(wid))
    client.send("FETCH default")
    (place,) = server._by_wid[wid]
    wait_until(lambda: place._unsent_jobs)
    return client


@pytest.mark.slow
@pytest.mark.tuning(slow_reader_s=0.2)
@pytest.mark.parametrize(
    "limit", [pytest.param(limit, marks=pytest.mark.tuning(write_buffer_bytes=limit)) for limit in (10**9, 10_000)]
)
def test_a_job_is_released_if_only_part_of_its_reply_was_sent(connect, server, limit):
    """The job is released if the client resets the connection, and if the server closes it because it does not read."""
    connect().ask(push(jid="abcdefgh", args=["x" * 12_000_000]))
    deaf = fetch_without_reading(server)
    if limit == 10**9:
        reset(deaf)
    wait_until(is_back)
    deaf.close()


def test_a_fully_sent_job_is_not_released_when_its_client_resets(connect, server):
    connect().ask(push(jid="abcdefgh", args=["x" * 12_000_000]))
    late = fetch_without_reading(server)
    assert json.loads(late.reply())["jid"] == "abcdefgh"
    (place,) = server._by_wid["deaf"]
    wait_until(lambda: not place._unsent_jobs)
    reset(late)
    wait_until(lambda: "deaf" not in server._by_wid)
    assert connect().ask("INFO"), "a reset would have released the job by now"
    assert Job.objects.get().state == "working"


@pytest.mark.tuning(last_replies_s=0.2)
def test_a_stopping_server_releases_a_job_that_its_client_did_not_read(serve):
    """W28: a stopping server releases a job if the client did not read its reply."""
    server = serve()
    producer = RawClient.identified(server.address)
    producer.ask(push(jid="abcdefgh", args=["x" * 12_000_000]))
    deaf = fetch_without_reading(server)
    server.stop()
    wait_until(is_back)
    for one in (deaf, producer):
        one.close()


@over_both
@pytest.mark.parametrize("is_job_there", [True, False])
def test_a_claim_running_when_the_server_stops_is_answered(slow, broker, is_job_there):
    """W28: a claim that runs during the stop still gets its reply."""
    waits = RawClient.identified(slow.address, **worker())
    if is_job_there:
        waits.ask(push(jid="abcdefgh"))
    broker.delays_empty_claims = True
    waits.send("FETCH default")
    assert broker.has_claimed.wait(60)
    slow.stop()
    wait_until(lambda: all(waiting_fetch.has_timed_out for waiting_fetch in list(slow.fetch_queue._waiting)))
    broker.may_return.set()
    reply = waits.reply()
    assert (reply and json.loads(reply)["jid"]) == ("abcdefgh" if is_job_there else None)
    assert waits.is_closed()
    waits.close()


def test_a_job_with_a_corrupt_payload_is_not_delivered_and_becomes_dead(connect):
    client = connect(**worker())
    client.ask(push(jid="spoilt-1", priority=9))
    client.ask(push(jid="abcdefgh"))
    Job.objects.filter(jid="spoilt-1").update(payload='{"created_at":')
    assert client.ask("FETCH default") is None
    assert json.loads(client.ask("FETCH default"))["jid"] == "abcdefgh"
    wait_until(lambda: Job.objects.get(jid="spoilt-1").state == "dead")
    assert json.loads(Job.objects.get(jid="spoilt-1").failure)["errtype"] == "InvalidPayload"


def test_a_queue_name_with_a_null_byte_does_not_fail_any_fetch(connect, server):
    odd, good = connect(**worker("odd")), connect(**worker("good"))
    odd.send("FETCH a\x00b default")
    good.send("FETCH default")
    wait_until(lambda: len(server.fetch_queue._waiting) == 2)
    producer = connect()
    producer.ask(push(jid="abcdefgh"))
    producer.ask(push(jid="ijklmnop"))
    assert {json.loads(one.reply())["jid"] for one in (odd, good)} == {"abcdefgh", "ijklmnop"}
