"""Real worker processes that reach their limits are replaced under load, and no job is lost or run twice."""

from collections import Counter

import psutil
import pytest

from django_faktory.models import Job, WorkerProcess
from tests.project.models import Mark
from tests.project.tasks import noop, writes_mark
from tests.runtime.processes import tasks
from tests.runtime.processes.test_runfaktory import ANY_PORT, WORKER, reaches, state_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True), pytest.mark.once]

REPLACED = "worker will be replaced"


def pids(lines):
    return [int(line.rpartition("pid=")[2]) for line in lines]


def written(wanted):
    """Return how often each mark was written, once all are written."""
    wait_until(lambda: set(Mark.objects.values_list("text", flat=True)) >= wanted, 90)
    return Counter(Mark.objects.values_list("text", flat=True))


def test_a_process_at_max_jobs_is_replaced_and_each_job_runs_once(runfaktory):
    # a process also runs the jobs that it has fetched by its 20th: sometimes 100
    wanted = {f"job {number}" for number in range(500)}
    writes_mark.enqueue_many([(text,) for text in sorted(wanted)])
    program = runfaktory("--worker-only", "--processes", "2", "--concurrency", "2", "--max-jobs", "20")
    assert set(written(wanted).values()) == {1}
    assert len(set(pids(program.wait_for_log(REPLACED, "it ran", times=3)))) >= 3
    wait_until(lambda: not Job.objects.filter(state="working").exists())
    assert not Job.objects.exclude(losses=0, failures=0).exists()
    assert "child ended" not in program.text
    assert "ERROR" not in program.text


@pytest.mark.quick
def test_a_replaced_worker_unregisters_itself(runfaktory):
    """Check that a replaced worker unregisters, so that the maintenance does not have to detect its loss."""
    noop.enqueue()
    program = runfaktory(*WORKER, "--max-jobs", "1")
    program.wait_for_log("worker started", times=2)
    wait_until(lambda: WorkerProcess.objects.count() == 1)


def test_a_process_to_be_replaced_waits_for_its_running_jobs(runfaktory, meeting):
    """SHUTDOWN_TIMEOUT applies only to a worker that has been asked to stop."""
    long = tasks.waits.enqueue(str(meeting))
    program = runfaktory(*WORKER, "--max-jobs", "1", SHUTDOWN_TIMEOUT=0)
    pid = meeting.pid()
    reaches(noop.enqueue(), "succeeded")
    program.wait_for_log(REPLACED, f"pid={pid}")
    program.wait_for_log("worker is quiet")
    waiting = noop.enqueue()
    with pytest.raises(AssertionError, match="not true within"):  # a process that does not wait ends at once
        wait_until(lambda: not psutil.pid_exists(pid), 2)
    assert (state_of(long), state_of(waiting)) == ("working", "enqueued")
    meeting.release_task()
    reaches(long, "succeeded")
    reaches(waiting, "succeeded")
    assert Job.objects.get(jid=long.id).failures == 0


def test_a_process_above_max_rss_is_replaced_after_the_job(runfaktory, tmp_path):
    program = runfaktory(*WORKER, "--max-rss", "350")
    fat = tasks.keeps_memory.enqueue(400)
    reaches(fat, "succeeded")
    [pid] = pids(program.wait_for_log(REPLACED, "MAX_RSS is 350"))
    reaches(tasks.writes_pid.enqueue(str(tmp_path / "pid")), "succeeded")
    assert int((tmp_path / "pid").read_text()) != pid
    wait_until(lambda: not psutil.pid_exists(pid))


def test_a_drain_continues_with_new_processes_until_no_job_is_ready(runfaktory):
    results = noop.enqueue_many([()] * 300)  # more than a process prefetches: it runs all that it has
    program = runfaktory(ANY_PORT, "--processes", "1", "--concurrency", "2", "--drain", "--max-jobs", "5")
    assert program.code(90) == 0
    assert {state_of(result) for result in results} == {"succeeded"}
    program.wait_for_log(REPLACED, times=2)
