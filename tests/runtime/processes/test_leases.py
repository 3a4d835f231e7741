"""How long jobs stay with real worker processes, and with nodes that are killed. Rules: W19, W20."""

import json
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.utils import timezone

from django_faktory.models import Job, WorkerProcess
from tests.bouncer import needs_session
from tests.faults.proxy import Proxy
from tests.runtime.processes import tasks
from tests.runtime.processes.conftest import Meeting
from tests.runtime.processes.test_nodes import client, kill, nodes  # noqa: F401  (fixtures)
from tests.server.raw import push, worker
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]

PORT = {"postgresql": "PGPORT", "mysql": "MYSQL_PORT"}
TIMEOUT_S = 4
LEASE_S = 2 * TIMEOUT_S
"""Minimum reservation of a worker's claim."""


@contextmanager
def wire():
    """Run a proxy before the database server. Yield the proxy and the environment of programs that use it."""
    found = connection.settings_dict
    proxy = Proxy((found["HOST"] or "127.0.0.1", int(found["PORT"])))
    try:
        yield proxy, {PORT[connection.vendor]: str(proxy.port)}
    finally:
        proxy.close()


def long_jobs(tmp_path, *kinds):
    """Enqueue jobs that run until the test releases them, each with a reservation of 1 s."""
    meetings = {}
    for kind in kinds:
        (tmp_path / kind.func.__name__).mkdir()
        meetings[kind] = Meeting(tmp_path / kind.func.__name__)
        kind.enqueue(str(meetings[kind]))
    Job.objects.update(reserve_for=1)
    return meetings


def begun(meeting):
    path = meeting.folder / "begun"
    return len(path.read_text().splitlines()) if path.exists() else 0


def all_run(meetings):
    wait_until(lambda: all(map(begun, meetings.values())), 60, what="all jobs run")


def end_well(meetings):
    """Release the jobs, and check that each ran once."""
    assert {(job.state, job.claims, job.failures, job.losses) for job in Job.objects.all()} <= {("working", 1, 0, 0)}
    for meeting in meetings.values():
        meeting.release_task()
    wait_until(lambda: not Job.objects.exclude(state="succeeded").exists(), 60, what="all succeeded")
    assert {(job.claims, job.failures, job.losses) for job in Job.objects.all()} == {(1, 0, 0)}
    assert [begun(meeting) for meeting in meetings.values()] == [1] * len(meetings)


def test_a_job_that_runs_much_longer_than_its_reservation_runs_once(runfaktory, tmp_path):
    """In threads, on the event loop, and in a transaction: a job stays claimed while its worker lives."""
    kinds = (tasks.runs_long, tasks.runs_long_async)
    if connection.vendor != "sqlite":  # there a transaction that writes would lock the whole database
        kinds += (tasks.runs_long_atomic,)
    meetings = long_jobs(tmp_path, *kinds)
    runfaktory("127.0.0.1:0", "--processes", "1", "--no-reload", WORKER_TIMEOUT=TIMEOUT_S)
    all_run(meetings)
    reserved = max(Job.objects.values_list("reserved_until", flat=True))
    longer = {"reserved_until__gt": reserved + timedelta(seconds=1.2 * LEASE_S)}
    wait_until(lambda: not Job.objects.exclude(**longer).exists(), 90, what="all reservations are extended")
    end_well(meetings)


def test_a_living_worker_keeps_its_jobs_through_a_long_database_outage(runfaktory, tmp_path):
    """A worker keeps its running job, and a job that ended while its end could not be reported (ADR 0017)."""
    if connection.vendor not in PORT:
        pytest.skip("needs a network connection to the database")
    meetings = long_jobs(tmp_path, tasks.runs_long, tasks.runs_long_async)
    with wire() as (proxy, environment):
        runfaktory("127.0.0.1:0", "--processes", "1", "--no-reload", environment=environment, WORKER_TIMEOUT=TIMEOUT_S)
        all_run(meetings)
        wait_until(lambda: WorkerProcess.objects.filter(beat_at__isnull=False).exists())
        proxy.harm("reset")
        meetings[tasks.runs_long_async].release_task()
        over = Job.objects.filter(state="working", reserved_until__lt=Now())
        wait_until(lambda: over.count() == len(meetings), 60, what="all reservations have expired")
        proxy.harm("")
        ended = Job.objects.filter(state="succeeded", failures=0, losses=0)
        wait_until(ended.exists, 60, what="the delayed end of the job is reported")
        wait_until(lambda: not over.exists(), 60, what="the other reservation is extended")
        del meetings[tasks.runs_long_async]
        assert Job.objects.filter(state="working", failures=0, losses=0).count() == 1
        meetings[tasks.runs_long].release_task()
        wait_until(lambda: ended.count() == 2, 60, what="both succeeded")
    assert begun(meetings[tasks.runs_long]) == 1


class TestKilledNode:
    """A job that a node claimed for a worker without BEATs is released within the lease, and uses no retry."""

    @needs_session("prepared statements")
    def test_a_claimed_but_undelivered_job_becomes_available_again(self, nodes, client, runfaktory, address):  # noqa: F811
        if connection.vendor != "postgresql":
            pytest.skip("elsewhere a claim takes several round trips")
        with wire() as (proxy, environment):
            first = runfaktory("127.0.0.1:0", "--server-only", "--no-reload", environment=environment, PREFETCH=0)
            node = address(first), first
            one = client(node, **worker("wid-1"))
            for number in range(6):  # afterwards its statements are prepared, and a claim is one message
                assert one.ask(push(jid=f"before-{number}")) == b"+OK"
                assert json.loads(one.ask("FETCH default"))["jid"] == f"before-{number}"
                assert one.ask(f'ACK {{"jid":"before-{number}"}}') == b"+OK"
            assert one.ask(push(jid="not-delivered", retry=0, reserve_for=1800)) == b"+OK"
            proxy.harm("mute")
            one.send("FETCH default")
            row = wait_until(lambda: Job.objects.filter(jid="not-delivered", state="working").first())
            kill(node)
        assert row.reserved_until - row.started_at <= timedelta(seconds=60)
        [other] = nodes(1, WORKER_TIMEOUT=TIMEOUT_S, POLL_INTERVAL=0.2)
        two = client(other, **worker("wid-2"))
        Job.objects.update(reserved_until=timezone.now() - timedelta(seconds=1))  # the lease is over
        found = wait_until(lambda: two.ask('BEAT {"wid":"wid-2"}') == b"+OK" and two.ask("FETCH default"), 60)
        assert json.loads(found)["jid"] == "not-delivered"
        again = Job.objects.get()
        assert (again.claims, again.failures, again.losses) == (2, 0, 0)

    @pytest.mark.quick
    def test_a_delivered_job_stays_with_its_worker(self, nodes, client):  # noqa: F811
        """Check that a delivered job stays with its worker after the delivering node was killed."""
        first, second = nodes(2)
        one = client(first, **worker("wid-1"))
        assert one.ask(push(jid="delivered", reserve_for=600)) == b"+OK"
        assert json.loads(one.ask("FETCH default"))["jid"] == "delivered"
        row = wait_until(lambda: Job.objects.filter(claim__gt=0).first(), what="its delivery is confirmed")
        kill(first)
        assert row.reserved_until - row.started_at >= timedelta(seconds=590)
        two = client(second, **worker("wid-1"))
        assert two.ask('ACK {"jid":"delivered"}') == b"+OK"
        assert not Job.objects.exists()

    def test_a_job_delivered_just_before_stays_with_a_worker_that_beats_elsewhere(self, nodes, client):  # noqa: F811
        first, second = nodes(2)
        one = client(first, **worker("wid-1"))
        assert one.ask(push(jid="delivered", reserve_for=600)) == b"+OK"
        assert json.loads(one.ask("FETCH default"))["jid"] == "delivered"
        kill(first)
        ten_seconds_ago = timezone.now() - timedelta(seconds=10)
        Job.objects.update(started_at=ten_seconds_ago, reserved_until=ten_seconds_ago + timedelta(seconds=60))
        two = client(second, **worker("wid-1"))
        assert two.ask('BEAT {"wid":"wid-1"}') == b"+OK"
        assert Job.objects.get().reserved_until > timezone.now() + timedelta(seconds=500)
        assert two.ask('ACK {"jid":"delivered"}') == b"+OK"
        assert not Job.objects.exists()
