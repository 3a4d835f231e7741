"""runfaktory as users run it: real processes, a real database, signals by process id."""

import os
import signal

import psutil
import pytest
from django.db import connection

from django_faktory.models import Job, WorkerProcess
from django_faktory.store import workers
from tests.bouncer import needs_session
from tests.project.tasks import add, async_add, fails_for_good, flaky, noop
from tests.runtime.processes import tasks
from tests.server.raw import CERTIFICATE, RawClient
from tests.settings import KIND
from tests.standing import suspend_process
from tests.tracers import UNTRACED
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once]

ANY_PORT = "127.0.0.1:0"
WORKER = ("--worker-only", "--processes", "1", "--concurrency", "2")


def state_of(result):
    return Job.objects.values_list("state", flat=True).get(jid=result.id)


def reaches(result, state, timeout_s=90):
    try:
        wait_until(lambda: state_of(result) == state, timeout_s)
    except AssertionError:
        row = Job.objects.filter(jid=result.id).values().first()
        raise AssertionError(f"job not {state} within {timeout_s} s: {row}") from None


@pytest.fixture
def empty_pool(transactional_db):
    """Close Django's pool after the test, which ended its connections: the next test would get them."""
    yield
    connection.close()
    if connection.vendor == "postgresql":
        connection.close_pool()


class TestWorking:
    @pytest.mark.quick
    def test_one_command_runs_the_server_and_the_workers(self, runfaktory, address):
        program = runfaktory(ANY_PORT, "--processes", "1")
        results = [add.enqueue(2, 3), async_add.enqueue(2, 3)]
        for result in results:
            reaches(result, "succeeded")
        client = RawClient.identified(address(program), wid="another-worker")
        client.close()
        program.signal(signal.SIGTERM)
        assert program.code() == 0
        assert WorkerProcess.objects.filter(pid__in=[process.pid for process in program._family]).count() == 0

    def test_the_first_log_line_describes_the_configuration(self, runfaktory):
        program = runfaktory(ANY_PORT, "--processes", "2", "--concurrency", "3", "--queues", "mail,default:2")
        [line] = program.wait_for_log("runfaktory:")
        for words in ("127.0.0.1:0", f"database default ({wire_name()})", "2 × 3 threads", "mail,default:2"):
            assert words in line

    def test_server_only_starts_no_workers(self, runfaktory, address):
        program = runfaktory(ANY_PORT, "--server-only")
        address(program)
        assert "worker started" not in program.text
        assert len(program.children()) == 1

    def test_workers_without_a_server_also_do_the_maintenance(self, runfaktory):
        """Check that a retry comes due: a worker without a server must enqueue it."""
        result = flaky.enqueue(2)
        program = runfaktory(*WORKER)
        reaches(result, "succeeded")
        assert "server listens" not in program.text

    def test_the_server_supports_tls_and_a_password_file(self, runfaktory, address, tmp_path):
        (tmp_path / "password").write_text("s3cret\n")
        from_file = {"FAKTORY_PASSWORD": str(tmp_path / "password")}
        files = ("--tls-cert", str(CERTIFICATE), "--tls-key", str(CERTIFICATE))
        server = runfaktory(ANY_PORT, "--server-only", *files, environment=from_file)
        _, port = address(server)
        worker = runfaktory(*WORKER, "--url", f"tcp+tls://:s3cret@localhost:{port}?ca={CERTIFICATE}")
        result = add.enqueue(2, 3)
        reaches(result, "succeeded")
        assert "s3cret" not in server.text + worker.text
        [line] = server.wait_for_log("runfaktory:")
        assert "with TLS" in line

    def test_the_url_of_the_environment_is_used_with_a_remote_broker(self, runfaktory, address):
        server = runfaktory(ANY_PORT, "--server-only")
        url = "tcp://{}:{}".format(*address(server))
        runfaktory(*WORKER, BROKER="remote", environment={"FAKTORY_URL": url})
        result = noop.enqueue()
        reaches(result, "succeeded")

    def test_with_debug_only_job_threads_log_queries(self, runfaktory):
        """Other threads log none: they live as long as the process, and nothing reads their `connection.queries`."""
        results = [tasks.counts_logged_queries.enqueue() for _ in range(3)]
        program = runfaktory(*WORKER, "--drain", "--no-reload", environment={"FAKTORY_TEST_DEBUG": "1"})
        assert program.code() == 0
        assert [Job.objects.get(jid=result.id).result for result in results] == ["[1,0]"] * 3

    def test_draining_exits_when_all_jobs_are_done(self, runfaktory):
        results = [*noop.enqueue_many([()] * 20), fails_for_good.enqueue(), flaky.enqueue(0)]
        program = runfaktory(*WORKER, "--drain")
        assert program.code() == 0
        assert [state_of(result) for result in results] == ["succeeded"] * 20 + ["dead", "succeeded"]

    @pytest.mark.parametrize(
        ("verbosity", "levels"), [("0", []), ("1", ["INFO"]), ("2", ["INFO", "DEBUG"]), ("3", ["INFO", "DEBUG"])]
    )
    def test_the_verbosity_selects_the_level_of_the_log(self, runfaktory, verbosity, levels):
        result = noop.enqueue()
        program = runfaktory(*WORKER, "--drain", "-v", verbosity)
        assert program.code() == 0
        assert (f"job succeeded jid={result.id} jobtype={noop.jobtype} queue=default" in program.text) == bool(levels)
        assert [level for level in ("INFO", "DEBUG") if f" {level} " in program.text] == levels


class TestStopping:
    @pytest.mark.quick
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_running_jobs_finish_during_shutdown(self, runfaktory, meeting, number):
        result = tasks.waits.enqueue(str(meeting))
        program = runfaktory(*WORKER)
        meeting.pid()
        program.signal(number)
        program.wait_for_log("worker stops")
        assert state_of(result) == "working"
        meeting.release_task()
        assert program.code() == 0
        assert state_of(result) == "succeeded"
        assert not WorkerProcess.objects.exists()

    @pytest.mark.quick
    def test_a_second_signal_ends_the_program_and_requeues_the_job(self, runfaktory, meeting):
        result = tasks.never_ends.enqueue(str(meeting))
        program = runfaktory(*WORKER)
        meeting.pid()
        program.signal(signal.SIGTERM)
        program.wait_for_log("worker stops")
        program.insist(signal.SIGTERM, "stopping at once")
        assert program.code(20) == 0
        job = Job.objects.get(jid=result.id)
        assert (job.state, job.losses, job.failures) == ("enqueued", 0, 0)

    def test_a_running_job_completes_after_its_supervisor_is_killed(self, runfaktory, meeting):
        result = tasks.waits.enqueue(str(meeting))
        program = runfaktory(*WORKER)
        worker_pid = meeting.pid()
        program.signal(signal.SIGKILL)
        program.wait_for_log("the parent process is gone")
        meeting.release_task()
        wait_until(lambda: not psutil.pid_exists(worker_pid))
        assert state_of(result) == "succeeded"


class TestCrashes:
    @pytest.mark.quick
    @pytest.mark.each_database
    def test_the_job_of_a_killed_worker_runs_again(self, runfaktory, meeting):
        """Check W20: the replacement reports the loss at once, without waiting for missing heartbeats."""
        result = tasks.waits.enqueue(str(meeting))
        runfaktory(*WORKER, WORKER_TIMEOUT=600)
        pid = meeting.pid()
        os.kill(pid, signal.SIGKILL)
        meeting.pid(but=pid)
        meeting.release_task()
        reaches(result, "succeeded")
        assert Job.objects.get(jid=result.id).losses == 1

    def test_a_process_with_an_unstoppable_task_is_replaced(self, runfaktory, meeting, tmp_path):
        stuck = tasks.never_ends_although_stopped.enqueue(str(meeting))
        program = runfaktory(*WORKER, environment=UNTRACED)
        pid = meeting.pid()
        reaches(stuck, "dead")
        assert Job.objects.get(jid=stuck.id).errtype == "TaskTimeout"
        wait_until(lambda: not psutil.pid_exists(pid))
        path = tmp_path / "successor"
        reaches(tasks.writes_pid.enqueue(str(path)), "succeeded")
        assert int(path.read_text()) != pid
        program.signal(signal.SIGTERM)
        assert program.code() == 0

    @pytest.mark.each_database
    @pytest.mark.skipif(KIND != "postgresql", reason="SQLite has no connections to break")
    @needs_session("the test would end its own sessions")
    def test_terminated_database_connections_are_reopened_without_losing_jobs(
        self, runfaktory, address, meeting, empty_pool
    ):
        """Check that workers and server reconnect (W30)."""
        running = tasks.waits.enqueue(str(meeting))
        program = runfaktory(ANY_PORT, "--processes", "1", "--concurrency", "2")
        address(program)
        meeting.pid()
        for _ in range(3):
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            reaches(add.enqueue(1, 2), "succeeded")
        meeting.release_task()
        reaches(running, "succeeded")
        assert Job.objects.get(jid=running.id).claims == 1


class TestOrders:
    def test_a_terminate_order_in_the_database_replaces_the_worker(self, runfaktory):
        """Check W21: the process ends, and its supervisor keeps the number of processes."""
        program = runfaktory(*WORKER)
        process = wait_until(lambda: WorkerProcess.objects.filter(beat_at__isnull=False).first())
        workers.advance([process.wid], "terminate", using="default")
        program.wait_for_log("worker stopped", process.wid)
        wait_until(lambda: WorkerProcess.objects.exclude(wid=process.wid).exists())

    def test_a_worker_suspended_beyond_worker_timeout_is_replaced(self, runfaktory, meeting):
        """Check that a worker that was paused beyond WORKER_TIMEOUT is replaced (W20)."""
        result = tasks.waits.enqueue(str(meeting))
        program = runfaktory(ANY_PORT, "--processes", "1", "--concurrency", "2", WORKER_TIMEOUT=2)
        pid = meeting.pid()
        suspend_process(pid)
        try:
            program.wait_for_log("workers lost")
        finally:
            os.kill(pid, signal.SIGCONT)
        program.wait_for_log("worker counts as lost")
        meeting.release_task()
        program.wait_for_log("came too late", result.id)
        meeting.pid(but=pid)
        meeting.release_task()
        reaches(result, "succeeded")


def wire_name():
    return {"mariadb": "mysql"}.get(KIND, KIND)
