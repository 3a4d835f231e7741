"""Processes of runfaktory that live and do not respond are killed and replaced, and their jobs are requeued."""

import signal
from datetime import timedelta
from http.client import HTTPException

import psutil
import pytest

from django_faktory.admin.jobs.detail import build_timeline
from django_faktory.brokers import get_broker
from django_faktory.models import Job
from django_faktory.runtime.supervisor.contract import ChildSpec
from django_faktory.runtime.supervisor.lost_workers import report_lost
from django_faktory.store import texts
from django_faktory.worker.process import new_wid
from tests.factories import T0, JobFactory
from tests.project.tasks import add, noop
from tests.runtime.processes import tasks
from tests.runtime.processes.test_probes import asked, place
from tests.runtime.processes.test_runfaktory import ANY_PORT, WORKER, reaches
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.django_db(transaction=True)]

HELD = {"started_at": T0, "reserved_until": T0 + timedelta(seconds=1800)}
SHORT = {"WORKER_TIMEOUT": 6, "BEAT_INTERVAL": 1}
"""A process is killed after 5 s without a heartbeat."""


def failing_checks(address):
    try:
        code, body = asked(address, "/healthz")
    except (OSError, HTTPException):  # the process that answers has just been killed
        return set()
    return {name for name, text in body["checks"].items() if text != "ok"} if code == 503 else set()


@pytest.fixture
def stuck(runfaktory, meeting):
    """Start a worker process with one job that holds the GIL. Return the program, the job's result and the pid."""

    def start(*args, **settings):
        result = tasks.holds_the_gil.enqueue(str(meeting))
        program = runfaktory(*args, **(SHORT | settings))
        return program, result, meeting.pid()

    return start


def test_a_job_that_holds_the_gil_is_dead_after_three_killed_processes(stuck, meeting):
    """Check W20: the job's `timeout` cannot stop it. Other jobs run in the other process."""
    program, result, pid = stuck(
        *("--worker-only", "--processes", "2", "--concurrency", "2"), WORKER_TIMEOUT=20, BEAT_INTERVAL=10
    )
    reaches(add.enqueue(2, 3), "succeeded")
    wait_until(lambda: not psutil.pid_exists(pid), what="the process that holds the GIL is killed")
    [line] = program.wait_for_log("process does not respond, killed it", f"pid={pid}")
    program.wait_for_log("worker started", times=3)
    reaches(result, "dead", 120)
    reaches(noop.enqueue(), "succeeded")
    job = Job.objects.get(jid=result.id)
    assert (job.errtype, job.losses, job.failures) == ("WorkerLost", 3, 0)
    assert len((meeting.folder / "runs").read_text().split()) == 3
    silent_s = line.partition("silent=")[2].split()[0]
    assert f"(1 of 3): its process stopped responding and was killed after {silent_s} s" in job.history


def test_healthz_fails_while_a_worker_does_not_respond(stuck):
    program, _, _ = stuck(ANY_PORT, "--processes", "1", "--concurrency", "1", "--health", "127.0.0.1:0")
    address = place(program)
    wait_until(lambda: failing_checks(address) == {"processes"}, 60)
    program.wait_for_log("process does not respond, killed it role=worker 0")
    wait_until(lambda: asked(address, "/healthz")[0] == 200, 60)


def test_a_server_whose_event_loop_is_blocked_is_replaced(runfaktory, address):
    program = runfaktory(ANY_PORT, "--server-only", "--health", "127.0.0.1:0", WORKER_TIMEOUT=15, BEAT_INTERVAL=1)
    address(program)
    probes = place(program)
    [server] = program.children()
    server.send_signal(signal.SIGUSR1)
    program.wait_for_log("event loop is blocked", "loop=server")
    program.wait_for_log("in block_main_thread")
    wait_until(lambda: "server" in failing_checks(probes), 60)
    program.wait_for_log("process does not respond, killed it role=server", f"pid={server.pid}")
    program.wait_for_log("server listens", times=2)
    program.wait_for_log("probes are answered", times=2)


def test_the_loss_message_describes_how_the_process_died():
    silent, crashed = (JobFactory(state="working", wid=wid, attempt=1, **HELD) for wid in ("wid-silent", "wid-crashed"))
    child_spec = ChildSpec(
        wid=new_wid(), lost=("wid-silent", "wid-crashed"), unresponsive={"wid-silent": 41}, parent_pipe=-1
    )
    report_lost(get_broker(), child_spec)
    silent.refresh_from_db()
    crashed.refresh_from_db()
    assert (silent.state, silent.losses, crashed.state, crashed.losses) == ("enqueued", 1, "enqueued", 1)
    lost = "was lost while it ran this job (1 of 3)"
    _, attempt, _ = build_timeline(silent, texts.read(silent, "history")["history"])
    assert attempt.message == f"worker wid-silent {lost}: its process stopped responding and was killed after 41 s"
    _, attempt, _ = build_timeline(crashed, texts.read(crashed, "history")["history"])
    assert attempt.message == f"worker wid-crashed {lost}"


def test_sigterm_ends_a_worker_that_holds_the_gil_and_requeues_its_job(stuck):
    program, result, pid = stuck(*WORKER, WORKER_TIMEOUT=60, SHUTDOWN_TIMEOUT=1)
    program.signal(signal.SIGTERM)
    assert program.code(50) == 0, "1 s for the job, 4.5 s for the reports, and a margin for a slow machine"
    assert not psutil.pid_exists(pid)
    job = Job.objects.get(jid=result.id)
    assert (job.state, job.losses, job.failures) == ("enqueued", 0, 0)


def test_a_coroutine_that_blocks_the_event_loop_is_logged_with_its_task_and_its_stack(runfaktory, meeting):
    result = tasks.blocks_the_loop.enqueue(str(meeting))
    program = runfaktory(*WORKER)
    meeting.pid()
    program.wait_for_log(
        "event loop is blocked", "loop=tasks", "jobtype=tests.runtime.processes.tasks.blocks_the_loop", result.id
    )
    program.wait_for_log("in blocks_the_loop")
    meeting.release_task()
    program.wait_for_log("event loop answers again", result.id, "blocked=")
    reaches(result, "succeeded")


def test_a_job_that_kills_its_process_is_dead_and_its_neighbor_succeeds(runfaktory, meeting):
    """Check W20: the other job was lost with it twice; the third time each runs alone."""
    innocent = tasks.runs_with_a_dying_job.enqueue(str(meeting))
    pill = tasks.dies_with_another_job.enqueue(str(meeting))
    runfaktory(*WORKER)
    reaches(pill, "dead")
    reaches(innocent, "succeeded")
    assert [*Job.objects.order_by("id").values_list("losses", flat=True)] == [2, 3]
