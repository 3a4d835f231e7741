"""`@task(atomic=True)`: a task's writes and the end of its job commit or roll back together."""

import threading

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_faktory import task
from django_faktory.brokers import get_broker
from django_faktory.brokers.remote import RemoteBroker
from django_faktory.core.payloads import Ack, Failure, Interruption
from django_faktory.models import Job
from django_faktory.tasks.compat import TaskResultStatus, task_finished
from django_faktory.worker.execution import prepare
from tests.project import tasks
from tests.project.models import Mark
from tests.tasks.work import fetched, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True, params=["in two messages", "in one message"])
def way(request):
    """Send a job's end and COMMIT in two messages or in one."""
    connection.force_debug_cursor = request.param == "in two messages"  # the log has to see each statement
    yield
    connection.force_debug_cursor = False
    connection.close()


def state():
    """Return the state of the one job, and the texts of all marks."""
    return Job.objects.exclude(jobtype__endswith="noop").get().state, list(Mark.objects.values_list("text", flat=True))


def test_an_atomic_task_commits_its_writes_and_its_job_end_together():
    result = tasks.writes_mark_atomically.enqueue("a")
    assert work() is None, "nothing is left to report"
    assert state() == ("succeeded", ["a"])
    result.refresh()
    assert (result.status, result.return_value) == (TaskResultStatus.SUCCESSFUL, "a")


def test_a_job_without_a_result_ttl_is_deleted_by_the_commit():
    Job.objects.filter(jid=tasks.writes_mark_atomically.enqueue("a").id).update(result_ttl=None)
    work()
    assert not Job.objects.exists()
    assert Mark.objects.count() == 1


@pytest.mark.parametrize(
    ("then", "ends"),
    [
        ("fails", "retries"),
        ("returns nothing that JSON knows", "dead"),
        ("leaves a transaction open", "retries"),
        ("gives its transaction up", "retries"),
    ],
)
def test_a_failed_atomic_task_leaves_no_writes(then, ends):
    tasks.writes_mark_atomically_and.enqueue("a", then)
    assert isinstance(work(), Failure)
    assert state() == (ends, [])


def test_a_transaction_aborted_by_a_failed_statement_is_not_a_success():
    tasks.writes_mark_atomically_and.enqueue("a", "breaks the transaction and goes on")
    report = work()
    if connection.vendor == "postgresql":
        assert isinstance(report, Failure)
        assert state() == ("retries", [])
    else:  # these databases continue after a failed statement, and so may the task
        assert state() == ("succeeded", ["a"])


def test_a_rolled_back_savepoint_does_not_fail_the_task():
    tasks.writes_mark_atomically_and.enqueue("a", "breaks a savepoint and goes on")
    assert work() is None
    assert state() == ("succeeded", ["a"])


def test_jobs_enqueued_by_an_atomic_task_appear_only_if_it_commits():
    tasks.writes_mark_atomically_and.enqueue("a", "enqueues and fails")
    work()
    assert not Job.objects.filter(jobtype=tasks.noop.jobtype).exists()
    Job.objects.all().delete()
    tasks.writes_mark_atomically_and.enqueue("a", "enqueues")
    work()
    assert Job.objects.filter(jobtype=tasks.noop.jobtype, state="enqueued").count() == 1


def test_a_worker_that_lost_the_job_commits_no_writes(caplog):
    finished = []

    def note(sender, task_result, **_):
        finished.append(task_result.id)

    task_finished.connect(note)
    tasks.writes_mark_atomically.enqueue("a")
    execution = prepare(fetched("w1"))
    get_broker().lost(["w1"])
    again = prepare(fetched("w2"))
    assert execution.run(get_broker()) is None
    assert state() == ("working", [])
    assert not finished
    assert "no longer this worker's" in caplog.text
    assert again.run(get_broker()) is None
    assert state() == ("succeeded", ["a"])
    assert len(finished) == 1


def test_a_failing_on_commit_hook_does_not_undo_the_commit(caplog):
    result = tasks.writes_mark_atomically_and.enqueue("a", "hooks that fail")
    assert work() is None
    assert state() == ("succeeded", ["a"])
    result.refresh()
    assert result.status is TaskResultStatus.SUCCESSFUL
    assert "a hook that ran after its commit failed" in caplog.text


def test_an_atomic_task_without_queries_returns_an_ack_on_postgresql():
    tasks.does_atomically.enqueue("nothing")
    execution = prepare(fetched())
    with CaptureQueriesContext(connection) as asked:
        report = execution.run(get_broker())
    if connection.vendor == "postgresql":  # other databases cannot report whether a transaction has changes
        assert isinstance(report, Ack)
        assert [query["sql"] for query in asked] == ["BEGIN", "COMMIT"], "Django logs both, but sends neither"
        assert get_broker().ack([report]) == [True]
    else:
        assert report is None
    assert state() == ("succeeded", [])


@pytest.mark.parametrize("what", ["a hook", "a look"])
def test_an_atomic_task_with_hook_or_read_ends_in_its_transaction(what):
    tasks.does_atomically.enqueue(what)
    assert work() is None
    assert state() == ("succeeded", [])


def test_a_successful_retry_writes_only_once():
    tasks.writes_mark_atomically_and.enqueue("a", "fails")
    work()
    Job.objects.update(
        state="enqueued",
        run_at=None,
        payload=Job.objects.get().payload.replace("fails", "goes well"),
    )
    assert work("w2") is None
    assert state() == ("succeeded", ["a"])


class Holder:
    """Another transaction that locks the job's row from `lock` to `release`."""

    def __init__(self):
        self._locked, self._released = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold)

    def lock(self):
        self._thread.start()
        assert self._locked.wait(60)

    def release(self):
        self._released.set()
        self._thread.join(60)

    def _hold(self):
        with transaction.atomic():
            list(Job.objects.select_for_update())
            self._locked.set()
            self._released.wait(60)
        connection.close()


@task(atomic=True, max_attempts=1)
def writes_while_another_transaction_locks_its_job():
    Mark.objects.create(text="a")
    with connection.cursor() as cursor:
        on_postgresql = connection.vendor == "postgresql"
        cursor.execute("SET lock_timeout = '50ms'" if on_postgresql else "SET innodb_lock_wait_timeout = 1")
    holders[0].lock()


holders = []


def test_a_job_end_blocked_by_another_transaction_costs_no_attempt():
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has one writer, so no commit waits for another transaction")
    holders[:] = [Holder()]
    jid = writes_while_another_transaction_locks_its_job.enqueue().id
    report = prepare(fetched()).run(get_broker())
    holders[0].release()
    assert (type(report), report.summary) == (Interruption, "rolled back by the database")
    assert get_broker().interrupt([report]) == [True]
    job = Job.objects.get(jid=jid)
    assert (job.state, job.failures, job.losses, job.interruptions) == ("enqueued", 0, 0, 1)
    assert not Mark.objects.exists()
    connection.close()  # the task has set the lock timeout of its session


def test_an_atomic_task_fails_with_a_remote_broker():
    tasks.writes_mark_atomically.enqueue("a")
    report = prepare(fetched()).run(RemoteBroker("tcp://127.0.0.1:1"))
    assert isinstance(report, Failure)
    assert 'FAKTORY["BROKER"] = "orm"' in report.message
    assert not Mark.objects.exists()
