"""Atomic tasks on PostgreSQL: the job's end and COMMIT share one message, with the same guarantees as two."""

import os
import socket
from contextlib import suppress
from datetime import timedelta

import pytest
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_faktory import Batch, task
from django_faktory.brokers import get_broker
from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.histograms import Recorder
from django_faktory.core.limits import Allowance
from django_faktory.core.payloads import Failure, Interruption
from django_faktory.models import Job, JobLock, Limiter
from django_faktory.store.dialects.postgresql import pipeline, prepared
from django_faktory.store.limits import definitions
from django_faktory.store.statistics import counts
from django_faktory.worker.execution import prepare
from tests.bouncer import needs_session
from tests.factories import T0, JobFactory
from tests.project.models import Mark
from tests.tasks.work import fetched, work
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    needs_session("prepared statements need a session"),
]

steps = []


@task(atomic=True, max_attempts=2)
def writes_and(text):
    Mark.objects.create(text=text)
    for step in steps:
        step()
    return text


@task(atomic=True, max_attempts=2)
def only_steps():
    for step in steps:
        step()


@pytest.fixture(autouse=True)
def on_postgresql():
    if connection.vendor != "postgresql" or not pipeline.has_psycopg3():
        pytest.skip("about PostgreSQL")
    steps.clear()
    yield
    connection.close()


@pytest.fixture(autouse=True)
def sent(monkeypatch):
    """Record the outcome of each message with a job's end and COMMIT: "committed" or "nothing"."""
    outcomes = []
    real = prepared.run_and_commit

    def spy(on, calls):
        are_ends = ["faktory_end_1" in name for name, _ in calls]
        # A failure is reported in such a message too, if earlier tests have prepared its statements.
        if not any(are_ends):
            return real(on, calls)
        assert are_ends == [True]
        outcomes.append("nothing")
        rows = real(on, calls)
        outcomes[-1] = "committed"
        return rows

    monkeypatch.setattr(prepared, "run_and_commit", spy)
    return outcomes


def marks():
    return list(Mark.objects.values_list("text", flat=True))


def state():
    return Job.objects.get().state


def sql(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)


def assert_django_is_well():
    """Assert that the connection is as before the job: outside any block, in autocommit mode."""
    assert not connection.in_atomic_block
    assert not connection.needs_rollback
    assert (connection.savepoint_ids, connection.atomic_blocks, connection.run_on_commit) == ([], [], [])
    assert connection.get_autocommit()
    assert connection.connection.pgconn.transaction_status == 0


def test_the_job_end_and_the_commit_are_sent_in_one_message(sent):
    result = writes_and.enqueue("a")
    assert work() is None
    assert (sent, state(), marks()) == (["committed"], "succeeded", ["a"])
    result.refresh()
    assert result.return_value == "a"
    assert_django_is_well()
    assert counts.read(using="default").totals["processed"] == 1


def test_a_result_ttl_set_while_the_job_runs_keeps_its_result(sent):
    job = Job.objects.filter(jid=writes_and.enqueue("a").id)
    job.update(result_ttl=None)
    execution = prepare(fetched())
    job.update(result_ttl=60)
    execution.run(get_broker())
    assert (sent, state()) == (["committed"], "succeeded")


def test_on_commit_hooks_run_in_order_after_the_commit(sent):
    heard = []

    def hook(name):
        return lambda: heard.append((name, sent[-1], connection.in_atomic_block, connection.get_autocommit()))

    def registers():
        transaction.on_commit(hook("first"))
        with transaction.atomic():
            transaction.on_commit(hook("second"))
        transaction.on_commit(hook("third"), robust=True)

    steps.append(registers)
    writes_and.enqueue("a")
    work()
    assert heard == [(name, "committed", False, True) for name in ("first", "second", "third")]
    assert_django_is_well()


def test_nested_blocks_and_other_databases_work_as_usual(sent):
    def works_elsewhere():
        with transaction.atomic(using="other", durable=True):
            Mark.objects.using("other").create(text="there")
        with transaction.atomic(), transaction.atomic(savepoint=False):
            Mark.objects.create(text="b")
        sid = connection.savepoint()
        Mark.objects.create(text="never")
        connection.savepoint_rollback(sid)

    steps.append(works_elsewhere)
    writes_and.enqueue("a")
    work()
    assert (sent, marks()) == (["committed"], ["a", "b"])
    assert Mark.objects.using("other").count() == 1
    assert not connections["other"].in_atomic_block


def test_an_earlier_attempt_by_the_same_worker_commits_nothing(sent):
    writes_and.enqueue("a")
    execution = prepare(fetched("w1"))
    get_broker().lost(["w1"])
    fetched("w1")
    assert execution.run(get_broker()) is None
    assert (sent, state(), marks()) == (["nothing"], "working", [])


def test_a_violated_deferred_constraint_fails_the_attempt(sent):
    sql("CREATE TABLE IF NOT EXISTS node (id int PRIMARY KEY, up int REFERENCES node DEFERRABLE INITIALLY DEFERRED)")
    steps.append(lambda: sql("INSERT INTO node VALUES (1, 2)"))
    writes_and.enqueue("a")
    report = work()
    sql("DROP TABLE node")
    assert isinstance(report, Failure)
    assert report.errtype == "django.db.utils.IntegrityError"
    assert (sent, state(), marks()) == (["nothing"], "retries", [])
    assert_django_is_well()


def test_a_serialization_failure_of_the_job_end_costs_no_attempt(sent):
    only_steps.enqueue()
    execution = prepare(fetched())

    def works_isolated():
        sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        Mark.objects.create(text="a")
        with another_connection() as other:
            other.execute("UPDATE django_faktory_job SET cancel_requested_at = now()")

    steps.append(works_isolated)
    report = execution.run(get_broker())
    assert isinstance(report, Interruption)
    assert "could not serialize" in report.message
    assert (sent, state(), marks()) == (["nothing"], "working", [])
    assert get_broker().interrupt([report]) == [True]
    assert_django_is_well()


def test_a_connection_lost_before_the_commit_interrupts_the_job(sent):
    steps.append(lambda: cut(connection.connection.pgconn))
    writes_and.enqueue("a")
    report = work()
    assert isinstance(report, Interruption)
    assert (sent, state(), marks()) == (["nothing"], "enqueued", [])
    assert Job.objects.get().failures == 0
    assert_django_is_well()


def test_a_commit_with_a_lost_reply_is_valid_and_a_later_report_is_ignored(monkeypatch):
    writes_and.enqueue("a")
    execution = prepare(fetched())
    real = pipeline._receive_results

    def cut_off(pgconn):
        with another_connection() as other:
            ask = "SELECT state FROM django_faktory_history"
            wait_until(lambda: other.execute(ask).fetchone() == ("succeeded",))
        cut(pgconn)
        return real(pgconn)

    with monkeypatch.context() as harmed:
        harmed.setattr(pipeline, "_receive_results", cut_off)
        report = execution.run(get_broker())
    assert isinstance(report, Interruption)
    assert get_broker().interrupt([report]) == [False]
    assert (state(), marks()) == ("succeeded", ["a"])
    assert_django_is_well()


def cut(pgconn):
    """Shut the connection's socket down; data that has arrived and was not read is lost."""
    with socket.socket(fileno=os.dup(pgconn.socket)) as wire:
        with suppress(BlockingIOError):
            wire.recv(1 << 20, socket.MSG_DONTWAIT)
        wire.shutdown(socket.SHUT_RDWR)


def another_connection():
    """Return a driver connection in autocommit mode, independent of Django's."""
    import psycopg  # installed for PostgreSQL only

    given = connection.get_connection_params()
    address = {key: given[key] for key in ("dbname", "host", "port", "user", "password") if key in given}
    return psycopg.connect(autocommit=True, **address)


def test_a_transaction_marked_for_rollback_fails_the_attempt(sent):
    steps.append(lambda: transaction.set_rollback(True))
    writes_and.enqueue("a")
    assert isinstance(work(), Failure)
    assert (sent, state(), marks()) == ([], "retries", [])
    assert_django_is_well()


def test_batch_members_and_callbacks_do_not_use_the_one_message_commit(sent):
    with Batch(success=writes_and.callback("callback")) as batch:
        writes_and.enqueue("member")
    assert work() is None
    assert work() is None
    assert (sent, marks()) == ([], ["member", "callback"])
    assert batch.status().success_st == "2"


@pytest.mark.parametrize("scope", ["task", "queue"])
def test_a_limit_set_while_a_job_runs_counts_it_until_it_ends(sent, scope):
    writes_and.enqueue("a")
    execution = prepare(fetched())
    name = writes_and.jobtype if scope == "task" else "default"
    definitions.save_limit(scope, name, Allowance(concurrency=1), using="default")
    assert Limiter.objects.get().in_use == 1
    writes_and.enqueue("b")
    with pytest.raises(ValueError, match="not enough values"):
        fetched()
    assert execution.run(get_broker()) is None
    assert (sent, marks(), Limiter.objects.get().in_use) == (["committed"], ["a"], 0)
    prepare(fetched()).run(get_broker())
    assert (marks(), Limiter.objects.get().in_use) == (["a", "b"], 0)


@pytest.mark.parametrize("of", [{"bid": "b-1"}, {"callback_of": "b-1"}])
def test_a_job_that_gained_a_batch_while_running_commits_nothing(sent, of):
    jid = writes_and.enqueue("a").id
    execution = prepare(fetched())
    Job.objects.filter(jid=jid).update(**of)
    assert execution.run(get_broker()) is None
    assert (sent, state(), marks()) == (["nothing"], "working", [])


def test_a_holder_of_a_lock_releases_it_with_the_commit(sent):
    jid = writes_and.enqueue("a").id
    execution = prepare(fetched())
    lease = {"wid": "w1", "attempt": 1, "lease": timedelta(minutes=1), "acquired_at": T0, "expires_at": T0}
    lock = JobLock.objects.create(key="key", jid=jid, **lease)
    Job.objects.filter(jid=jid).update(lock_key="key", lock_token=lock.pk)
    JobFactory(state="blocked", lock_key="key", jid="behind-it")
    assert execution.run(get_broker()) is None
    assert (sent, marks(), JobLock.objects.count()) == (["committed"], ["a"], 0)
    assert Job.objects.get(jid="behind-it").state == "enqueued"


def test_captured_queries_include_begin_and_commit(sent):
    writes_and.enqueue("a")
    execution = prepare(fetched())
    with CaptureQueriesContext(connection) as asked:
        assert execution.run(get_broker()) is None
    first, *_, last = [query["sql"] for query in asked]
    assert (sent, first, last) == ([], "BEGIN", "COMMIT")
    assert (state(), marks()) == ("succeeded", ["a"])


def test_a_job_run_inside_the_callers_transaction_commits_nothing(sent):
    writes_and.enqueue("a")
    execution = prepare(fetched())
    with transaction.atomic():
        assert execution.run(get_broker()) is None
        transaction.set_rollback(True)
    assert (sent, state(), marks()) == ([], "working", [])


def test_a_broker_that_overrides_ack_is_called(sent):
    heard = []

    class Own(OrmBroker):
        def ack(self, acks):
            heard.append(len(acks))
            return super().ack(acks)

    writes_and.enqueue("a")
    assert prepare(fetched()).run(Own()) is None
    assert (sent, heard, state()) == ([], [1], "succeeded")


def test_the_recorder_counts_a_job_only_after_its_commit():
    recorder = Recorder()
    writes_and.enqueue("a")
    execution = prepare(fetched())
    steps.append(lambda: transaction.on_commit(lambda: heard.append(recorder.take())))
    heard = []
    execution.run(OrmBroker(recorder=recorder))
    [(place, counts)] = recorder.take().items()
    assert (place, counts.succeeded) == (("default", writes_and.jobtype), 1)
    assert heard == [{}]
