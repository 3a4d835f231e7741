"""Several nodes over one database: a client may connect to any of them. Rules: W13, W16, W20, W22, W24, W29."""

import json
import os
import signal
from datetime import timedelta

import pytest
from django.utils import timezone

from django_faktory.models import Job
from tests.bouncer import needs_session
from tests.server.raw import RawClient, push, worker
from tests.settings import KIND, VIA
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once_if_quick]

ONLY_HINTS = {} if KIND == "mariadb" or VIA == "bouncer" else {"POLL_INTERVAL": 600}
"""Settings that make tests fail if they need a poll, where nodes notify each other; a FETCH waits 2 s only."""


@pytest.fixture
def nodes(runfaktory, address):
    """Start servers together. Return the address and the program of each."""

    def start(count, **settings):
        programs = [
            runfaktory("127.0.0.1:0", "--server-only", "--no-reload", **ONLY_HINTS | settings) for _ in range(count)
        ]
        return [(address(program), program) for program in programs]

    return start


@pytest.fixture
def client():
    """Open clients of nodes. All are closed after the test."""
    clients = []

    def open_client(node, **hello):
        clients.append(RawClient.identified(node[0], **hello))
        return clients[-1]

    yield open_client
    for one in clients:
        one.close()


def kill(node):
    """Kill all processes of the node at once, so that none can unregister."""
    family = node[1].children()
    for process in family:
        process.suspend()
    os.kill(node[1].pid, signal.SIGKILL)
    for process in family:
        process.kill()
    for process in family:
        wait_until(lambda process=process: not process.is_running() or process.status() == "zombie")


def is_cut_off(client):
    """Return True if the connection has ended. It is reset if the killed process had not read all input."""
    try:
        return client.is_closed()
    except ConnectionResetError:
        return True


def info(client):
    return json.loads(client.ask("INFO"))["faktory"]


def jid_of(reply):
    return json.loads(reply)["jid"]


def test_a_job_can_be_pushed_fetched_and_acknowledged_on_different_nodes(nodes, client):
    """Check that push, fetch and acknowledgement may use different nodes (W13, W16)."""
    first, second, third = (client(node, **worker("wid-1")) for node in nodes(3))
    assert first.ask(push(jid="goes-around", queue="mail")) == b"+OK"
    assert jid_of(second.ask("FETCH mail")) == "goes-around"
    assert third.ask('ACK {"jid":"goes-around"}') == b"+OK"
    assert not Job.objects.exists()
    assert second.ask('FAIL {"jid":"goes-around"}') == b"-ERR Job not found goes-around"


def test_info_on_each_node_describes_the_whole_cluster(nodes, client):
    """Check that sizes, totals and workers cover the whole cluster (W22)."""
    first, second = nodes(2)
    one, other = client(first, **worker("wid-1")), client(second, **worker("wid-2"))
    one.ask('BEAT {"wid":"wid-1"}')
    other.ask('BEAT {"wid":"wid-2"}')
    for number in range(5):
        one.ask(push(jid=f"counted-{number}", queue="mail"))
    other.ask(push(jid="scheduled", at="2126-01-01T00:00:00Z"))
    done, failed, held = (jid_of(other.ask("FETCH mail")) for _ in range(3))
    assert one.ask(f'ACK {{"jid":"{done}"}}') == b"+OK"  # it belongs to another worker: no effect
    other.ask(f'ACK {{"jid":"{done}"}}')
    other.ask(f'FAIL {{"jid":"{failed}","errtype":"E"}}')
    for counts in (info(one), info(other)):
        assert counts["queues"]["mail"] == 2
        assert counts["sets"] == {"scheduled": 1, "retries": 1, "dead": 0, "working": 1, "blocked": 0}
        assert (counts["total_processed"], counts["total_failures"], counts["total_enqueued"]) == (2, 1, 2)
        assert counts["tasks"]["Workers"]["size"] == 2
    assert held == "counted-2"


def test_a_waiting_fetch_receives_a_job_pushed_on_another_node(nodes, client):
    """Check that a waiting FETCH is woken (W13). On PostgreSQL and SQLite a notification does it: no poll is due."""
    first, second = nodes(2)
    pusher, waiter = client(first), client(second, **worker())
    for number in range(3):
        waiter.send("FETCH other default")
        pusher.ask(push(jid=f"from-afar-{number}"))
        assert jid_of(waiter.reply()) == f"from-afar-{number}"
        waiter.ask(f'ACK {{"jid":"from-afar-{number}"}}')


def test_queue_pause_and_resume_apply_to_all_nodes(nodes, client):
    """Check that QUEUE PAUSE and RESUME apply to all nodes (W24)."""
    first, second = nodes(2)
    chief, waiter = client(first), client(second, **worker())
    assert chief.ask("QUEUE PAUSE default") == b"+OK"
    waiter.send("FETCH default")
    assert chief.ask(push(jid="paused-here")) == b"+OK"
    assert waiter.reply() is None
    waiter.send("FETCH default")
    assert chief.ask("QUEUE RESUME default") == b"+OK"
    assert jid_of(waiter.reply()) == "paused-here"


def test_a_killed_node_loses_no_jobs(nodes, client):
    """Check W16 and W29: accepted jobs are stored, and jobs that clients hold can be acknowledged on another node."""
    first, second = nodes(2)
    doomed, parked = client(first, **worker("wid-1")), client(first, **worker("wid-2"))
    accepted = {f"accepted-{number}" for number in range(3)}
    for jid in accepted:
        assert doomed.ask(push(jid=jid)) == b"+OK"
    held = jid_of(doomed.ask("FETCH default"))
    parked.send("FETCH elsewhere")
    kill(first)
    assert is_cut_off(parked)
    again, parked = client(second, **worker("wid-1")), client(second, **worker("wid-2"))
    assert again.ask(f'ACK {{"jid":"{held}"}}') == b"+OK"
    assert {jid_of(parked.ask("FETCH default")) for _ in range(2)} == accepted - {held}
    assert set(Job.objects.values_list("jid", "wid")) == {(jid, "wid-2") for jid in accepted - {held}}
    assert info(again)["total_processed"] == 1


def test_the_remaining_nodes_do_the_maintenance(nodes, client):
    """Check W13 and W20: any node enqueues due jobs and reclaims jobs of lost workers."""
    first, second = nodes(2, WORKER_TIMEOUT=1)
    doomed = client(first, **worker("wid-lost"))
    doomed.ask(push(jid="was-held"))
    assert jid_of(doomed.ask("FETCH default")) == "was-held"
    assert doomed.ask('BEAT {"wid":"wid-lost"}') == b"+OK"
    kill(first)
    heir = client(second, **worker("wid-heir"))
    assert jid_of(wait_until(lambda: heir.ask("FETCH default"))) == "was-held"


@needs_session("hints of the database need a session")
def test_processes_of_one_node_do_not_rely_on_polling(runfaktory, address, client):
    """Check W13: notifications of the database, or of other processes of the node, report pushed and due jobs."""
    program = runfaktory("127.0.0.1:0", "--processes", "1", "--no-reload", POLL_INTERVAL=600)
    pusher = client((address(program), program))
    program.wait_for_log("worker started")
    for number in range(3):
        at = (timezone.now() + timedelta(seconds=0.3 * number)).isoformat()
        text = {"jid": f"by-wire-{number}", "jobtype": "tests.project.tasks.noop", "args": [], "at": at}
        assert pusher.ask(f"PUSH {json.dumps(text)}") == b"+OK"
        wait_until(lambda number=number: not Job.objects.filter(jid=f"by-wire-{number}").exists())
