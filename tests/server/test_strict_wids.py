"""The setting `STRICT_WIDS`: only connections of the worker that holds a job may end it. Rules: W16, W17, W21."""

import json
from functools import partial

import pytest
from django.test import override_settings

from django_faktory.brokers.remote import RemoteBroker
from django_faktory.models import Job, WorkerProcess
from django_faktory.worker.worker import Worker
from tests.project import tasks
from tests.server.raw import push, worker
from tests.waiting import wait_until

pytestmark = pytest.mark.once_if_quick

strict = override_settings(FAKTORY={"STRICT_WIDS": True})

REFUSAL = "-ERR {}: this server has STRICT_WIDS, expected a connection that gave its wid in HELLO"


@pytest.fixture
def holder(connect):
    """Return a worker's client that has fetched a job."""
    client = connect(**worker("holder"))
    client.ask(push(jid="abcdefgh"))
    assert json.loads(client.ask("FETCH default"))["jid"] == "abcdefgh"
    return client


@pytest.mark.parametrize("line", ['ACK {"jid":"abcdefgh"}', 'FAIL {"jid":"abcdefgh"}'])
def test_a_connection_without_wid_may_not_end_a_job(connect, holder, line):
    with strict:
        assert connect().ask(line).decode() == REFUSAL.format(line.split()[0])
        assert Job.objects.get().state == "working"
        assert holder.ask(line) == b"+OK"
    assert not Job.objects.filter(state="working").exists()


@pytest.mark.parametrize("line", ['ACK {"jid":"abcdefgh"}', 'FAIL {"jid":"abcdefgh"}'])
def test_a_connection_without_wid_may_end_a_job_without_the_setting(connect, holder, line):
    """W16, W17: without the setting, a connection without wid may end any job."""
    assert connect().ask(line) == b"+OK"
    assert not Job.objects.filter(state="working").exists()


def test_fetch_on_a_connection_without_wid_is_refused(connect):
    client = connect()
    client.ask(push(jid="abcdefgh"))
    with strict:
        assert client.ask("FETCH default").decode() == REFUSAL.format("FETCH")
        assert Job.objects.get().state == "enqueued"


def test_a_connection_without_wid_may_report_progress_but_not_extend_a_reservation(connect, holder):
    client = connect()
    before = Job.objects.get().reserved_until
    with strict:
        until = 'TRACK SET {"jid":"abcdefgh","reserve_until":"2099-01-01T00:00:00Z"}'
        assert client.ask(until).decode() == REFUSAL.format("TRACK SET")
        assert client.ask('TRACK SET {"jid":"abcdefgh","percent":40}') == b"+OK"
        assert Job.objects.get().reserved_until == before
        assert holder.ask(until) == b"+OK"
    assert Job.objects.get().reserved_until > before


@pytest.mark.parametrize("state", ["", ',"current_state":"terminate"'])
def test_a_worker_may_not_beat_for_another_wid(connect, holder, state):
    other = connect(**worker("other"))
    line = f'BEAT {{"wid":"holder"{state}}}'
    with strict:
        answer = other.ask(line).decode()
        assert answer == "-ERR BEAT: this server has STRICT_WIDS, expected the wid that this connection gave in HELLO"
        assert WorkerProcess.objects.get(wid="holder").state == "running"
        assert holder.ask('BEAT {"wid":"holder"}') == b"+OK"
    assert other.ask('BEAT {"wid":"holder","current_state":"terminate"}') == b'{"state":"terminate"}'


def test_another_connection_of_the_same_wid_may_beat_and_ack(connect, holder):
    second = connect(**worker("holder"))
    with strict:
        assert second.ask('BEAT {"wid":"holder"}') == b"+OK"
        assert second.ask('ACK {"jid":"abcdefgh"}') == b"+OK"
    assert not Job.objects.exists()


def test_our_own_worker_runs_a_job_through_the_remote_broker(server):
    host, port = server.address
    url = f"tcp://{host}:{port}"
    with strict:
        result = tasks.add.enqueue(2, 3)
        running = Worker(RemoteBroker(url), queues=["default"], concurrency=1, beat_interval=0.2, drain=True)
        assert running.run()
        wait_until(partial(has_ended, result.id))


def has_ended(jid):
    """Return True if the job succeeded; a job without a kept result has been deleted."""
    row = Job.objects.filter(jid=jid).first()
    return row is None or row.state == "succeeded"
