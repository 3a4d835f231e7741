"""Order in which waiting and new FETCHes are served. Rule: W13."""

import json

import pytest

from django_faktory.models import Job
from tests.factories import JobFactory, QueueFactory
from tests.server.raw import RawClient, push, worker
from tests.waiting import wait_until

pytestmark = pytest.mark.once


@pytest.fixture
def quiet_server(serve, settings):
    """A server on which only pushes wake waiting FETCHes: no poll, no hint."""
    settings.FAKTORY = {"POLL_INTERVAL": 600.0}
    return serve()


@pytest.fixture
def clients(quiet_server):
    """Return a function that opens workers on one server, each with its own wid."""
    opened = []

    def start(count):
        opened.extend(RawClient.identified(quiet_server.address, **worker(f"wid-{n}")) for n in range(count))
        return opened[-count:]

    yield start
    for client in opened:
        client.close()


def park(server, client, *queues):
    """Send FETCH, and return once it waits."""
    before = parked(server)
    client.send(f"FETCH {' '.join(queues)}")
    wait_until(lambda: parked(server) == before + 1)


def parked(server):
    return sum(waiting_fetch.is_kept for waiting_fetch in list(server.fetch_queue._waiting))


def jid(reply):
    return reply and json.loads(reply)["jid"]


def many(*jids, **fields):
    return f"PUSHB [{','.join(push(jid=jid, **fields).removeprefix('PUSH ') for jid in jids)}]"


def test_the_longest_waiting_fetch_is_served_first(quiet_server, clients):
    *waiting, pusher = clients(6)
    for client in waiting:
        park(quiet_server, client, "default")
    for number, client in enumerate(waiting):
        assert pusher.ask(push(jid=f"in-turn-{number}")) == b"+OK"
        assert jid(client.reply()) == f"in-turn-{number}"


def test_jobs_of_one_pushb_are_delivered_to_waiting_fetches_in_order(quiet_server, clients):
    *waiting, pusher = clients(5)
    for client in waiting:
        park(quiet_server, client, "default")
    pusher.ask(many("first-job", "second-job", "third-job"))
    assert [jid(client.reply()) for client in waiting] == ["first-job", "second-job", "third-job", None]


def test_each_fetch_gets_a_job_from_its_first_nonempty_queue(quiet_server, clients):
    orders = ["a b c", "b c a", "c a b", "b a c"]
    pusher, *others = clients(5)
    for queue in "abc":
        pusher.ask(many(*(f"{queue}-job-number-{n}" for n in range(2)), queue=queue))
    got = [jid(client.ask(f"FETCH {order}")) for client, order in zip(others, orders, strict=True)]
    assert [name[0] for name in got] == ["a", "b", "c", "b"]


def test_a_fetch_waiting_for_other_queues_does_not_block_later_fetches(quiet_server, clients):
    first, second, pusher = clients(3)
    park(quiet_server, first, "rare", "rarer")
    park(quiet_server, second, "busy", "rare")
    pusher.ask(push(jid="busy-job", queue="busy"))
    assert jid(second.reply()) == "busy-job"
    park(quiet_server, second, "busy", "rare")
    pusher.ask(push(jid="rare-job", queue="rare"))
    assert jid(first.reply()) == "rare-job"


def test_a_paused_queue_does_not_block_the_queues_after_it(quiet_server, clients):
    QueueFactory(name="first", paused_at="2026-01-01T00:00:00Z")
    waiting, pusher = clients(2)
    pusher.ask(many("held-back", "held-too", queue="first"))
    park(quiet_server, waiting, "first", "second")
    pusher.ask(push(jid="goes-by-it", queue="second"))
    assert jid(waiting.reply()) == "goes-by-it"
    assert Job.objects.filter(state="enqueued").count() == 2


def test_a_pusher_that_fetches_at_once_does_not_overtake_a_waiting_fetch(quiet_server, clients):
    """Otherwise clients that repeat FETCH could starve waiting ones."""
    patient, hasty = clients(2)
    for number in range(2):
        park(quiet_server, patient, "other", "default")
        hasty.send(f"{push(jid=f'job-of-both-{number}')}\r\nFETCH default")
        assert hasty.reply() == b"+OK"
        assert jid(patient.reply()) == f"job-of-both-{number}"
        assert hasty.reply() is None


def test_a_new_fetch_is_tried_after_the_longest_waiting_one(quiet_server, clients):
    """A job that another process stored without a hint goes to the client that has waited longest."""
    patient, hasty = clients(2)
    park(quiet_server, patient, "default")
    JobFactory(jid="unheard-of")
    hasty.send("FETCH default")
    assert jid(patient.reply()) == "unheard-of"
    assert hasty.reply() is None
