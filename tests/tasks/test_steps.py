"""`context.step` and `context.astep`: each step commits once, with its record, and later runs skip it."""

import asyncio
import sys
import threading
from datetime import date

import msgspec
import pytest
from django.db import IntegrityError, OperationalError, connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_faktory.brokers import get_broker
from django_faktory.core.job_parser import parse_job
from django_faktory.core.payloads import Ack, Interruption
from django_faktory.core.steps import StepRecord
from django_faktory.errors import ReservationLost
from django_faktory.models import Job, JobStep
from django_faktory.store.jobs import steps as stored
from django_faktory.worker.execution import prepare
from tests.project.models import Mark
from tests.settings import KIND
from tests.tasks.programs import (
    again,
    follows,
    follows_async,
    in_secret,  # noqa: F401  (a fixture)
    mark,
    marks,
    message,
    programs,
    recorded,
    run,
)
from tests.tasks.work import fetched, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=["in two messages", "in one message"])
def way(request):
    """Send a step's record and COMMIT in two messages or in one."""
    connection.force_debug_cursor = request.param == "in two messages"  # the log has to see each statement
    yield request.param
    connection.force_debug_cursor = False
    connection.close()


# --- what is committed


def test_a_later_run_skips_a_committed_step_and_has_its_result(way):
    seen = []

    def program(context, order):
        with context.step("charge") as step:
            step.result = {"charged": order, "note": mark(f"charge {order}"), "pair": (1, 2)}
        seen.append(step.result)
        with context.step("pack"):
            mark("pack")
            if len(seen) == 1:
                raise ValueError("no box")
        return step.result["charged"]

    assert message(run(program, 7)) == "no box"
    assert (marks(), recorded()) == (["charge 7"], [("charge", "")])
    assert again().result == "7"
    assert (marks(), recorded()) == (["charge 7", "pack"], [("charge", ""), ("pack", "")])
    assert seen == [{"charged": 7, "note": "charge 7", "pair": [1, 2]}] * 2


@pytest.mark.parametrize("form", ["a tuple", "None"])
def test_the_run_that_commits_a_step_continues_with_what_later_runs_get(form):
    value = {"a tuple": (date.min.year, (2,)), "None": None}[form]

    def program(context):
        with context.step("a") as step:
            step.result = value
        return step.result

    first = run(program).result
    Job.objects.all().delete()

    def failing(context):
        program(context)
        raise ValueError

    run(failing)
    programs.append(program)
    assert again().result == first


def test_an_exception_in_a_step_undoes_the_step_and_nothing_else(way):
    def program(context):
        mark("outside")
        with context.step("a"):
            mark("a")
        try:
            with context.step("b"):
                mark("b")
                Mark.objects.create(pk=Mark.objects.latest("pk").pk, text="twice")
        except IntegrityError:
            mark("after")

    assert isinstance(run(program), Ack)
    assert (marks(), recorded()) == (["a", "after", "outside"], [("a", "")])


def test_a_worker_that_lost_the_job_commits_nothing_of_a_step_and_stops(way, caplog):
    def program(context):
        with context.step("a"):
            mark("a")
        try:
            with context.step("b"):
                mark("b")
                get_broker_elsewhere(lambda: get_broker().lost(["w1"]))
        except Exception:  # noqa: BLE001
            mark("went on")
        mark("after")

    def get_broker_elsewhere(call):
        thread = threading.Thread(target=lambda: (call(), connection.close()))
        if KIND != "sqlite":  # one writer: this thread has the lock
            thread.start()
            thread.join()

    programs.append(program)
    follows.enqueue()
    execution = prepare(fetched("w1"))
    if KIND == "sqlite":
        get_broker().lost(["w1"])
        assert execution.run(get_broker()) is None
        assert marks() == []
    else:
        assert execution.run(get_broker()) is None
        assert (marks(), recorded()) == (["a"], [("a", "")])
    assert "no longer this worker's" in caplog.text
    assert Job.objects.get().state == "enqueued"


def test_a_task_that_catches_the_end_of_a_lost_run_gets_it_again_at_the_next_step():
    def program(context):
        for name in "abc":
            try:
                with context.step(name):
                    mark(name)
            except BaseException:  # noqa: BLE001
                caught.append(name)

    caught = []
    programs.append(program)
    follows.enqueue()
    execution = prepare(fetched("w1"))
    get_broker().lost(["w1"])
    report = execution.run(get_broker())
    assert (caught, marks()) == (["a", "b", "c"], [])
    assert get_broker().ack([report]) == [False]


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_later_run_that_lost_the_job_enters_no_block_and_fails_nothing(names, caplog):
    def program(context):
        for name in names:
            if name == names[-1] and context.attempt == 2:
                get_broker().lost(["w2"])
            with context.step(name) as step:
                step.result = mark(name)
        raise ValueError

    run(program)
    Job.objects.all().retry()
    assert prepare(fetched("w2")).run(get_broker()) is None
    assert marks() == sorted(names)
    assert "no longer this worker's when a step began" in caplog.text


def test_a_reassignment_that_is_not_committed_yet_is_waited_for():
    if KIND == "sqlite":
        pytest.skip("one writer at a time")
    entered, may_commit = threading.Event(), threading.Event()

    def reassign():
        with transaction.atomic():
            Job.live.filter(wid="w1").update(wid="w2")
            entered.set()
            may_commit.wait(10)
        connection.close()

    def program(context):
        with context.step("a"):
            mark("a")
            thread.start()
            entered.wait(10)
            threading.Timer(0.2, may_commit.set).start()

    thread = threading.Thread(target=reassign)
    programs.append(program)
    follows.enqueue()
    assert prepare(fetched("w1")).run(get_broker()) is None
    thread.join()
    assert marks() == []


def test_a_hook_that_fails_after_the_commit_does_not_fail_the_step(caplog):
    def program(context):
        with context.step("a"):
            mark("a")
            transaction.on_commit(lambda: 1 / 0)

    assert isinstance(run(program), Ack)
    assert recorded() == [("a", "")]
    assert "a hook that ran after its commit failed" in caplog.text


def test_a_block_left_open_in_a_step_commits_nothing():
    def program(context):
        with context.step("a"):
            mark("a")
            transaction.atomic().__enter__()

    assert "left a transaction open" in message(run(program))
    assert (marks(), recorded()) == ([], [])


def test_a_lost_connection_is_no_failure_and_no_new_begin(monkeypatch):
    """A job whose first step is committed has begun: the run must not be repeated with the same claim."""
    begun = []

    def program(context):
        with context.step("a"):
            mark("a")
        begun.append(1)
        connection.close()
        monkeypatch.setattr(connection, "get_new_connection", refuse)
        with context.step("b"):
            mark("b")

    def refuse(*_):
        raise OperationalError("connection refused")

    report = run_once(program)
    monkeypatch.undo()
    assert isinstance(report, Interruption)
    assert report.errtype == "ConnectionLost"
    assert begun == [1]


def run_once(program):
    programs.append(program)
    follows.enqueue()
    return prepare(fetched()).run(get_broker())


# --- names and keys


def test_a_loop_gives_each_step_a_key():
    def program(context):
        for number in range(4):
            with context.step("mail", key=number) as step:
                step.result = mark(f"mail {number}")
            if number == 1 and context.attempt == 1:
                raise ValueError
        return step.result

    run(program)
    assert again().result == '"mail 3"'
    assert marks() == ["mail 0", "mail 1", "mail 2", "mail 3"]


def test_once_key_is_the_same_in_each_run_and_differs_for_each_step_and_job():
    def program(context):
        keys = []
        for name, key in [("a", None), ("a", 1), ("b", 1)]:
            with context.step(name, key=key) as step:
                keys.append(step.once_key)
                if name == "b":
                    found.append(keys)
                    raise ValueError
        return

    def only_the_last(context):
        with context.step("b", key=1) as step:
            found.append([step.once_key])
            raise ValueError

    found = []
    run(program)
    programs.append(only_the_last)
    again()
    Job.objects.all().delete()
    run(program)
    first, second, third = found
    assert first[2] == second[0]
    assert len({*first, *third}) == 6


# --- whose steps


def test_a_jid_pushed_again_has_no_steps():
    def program(context):
        with context.step("a"):
            mark("a")
        keys.append(context.task_result.id)
        raise ValueError

    keys = []
    run(program)
    job = Job.objects.get()
    for _ in range(2):
        Job.objects.all().kill()
        get_broker().push([parse_job(job.payload)])
        work()
    assert marks() == ["a"] * 3
    assert len(set(keys)) == 1


def test_steps_are_kept_while_their_job_has_a_row():
    def program(context):
        with context.step("a"):
            mark("a")

    run(program)
    run(program)
    assert Job.objects.succeeded().count() == 2
    assert stored.purge(using="default") is None
    assert JobStep.objects.count() == 2
    Job.objects.order_by("pk").first().delete()
    stored.purge(using="default")
    assert [step.job_id for step in JobStep.objects.all()] == [Job.objects.get().pk]


def test_a_purge_continues_behind_the_jobs_that_it_has_looked_up():
    def program(context):
        for number in range(3):
            with context.step("a", key=number):
                mark("a")

    for _ in range(3):
        run(program)
    Job.objects.all().delete()
    after, calls = None, 0
    while calls == 0 or after is not None:
        after = stored.purge(using="default", after=after, portion=3)
        calls += 1
    assert (JobStep.objects.count(), calls) == (0, 4)


def test_a_job_without_steps_asks_for_none_and_a_first_run_reads_none():
    def without(context):
        return context.attempt

    def with_one(context):
        with context.step("a"):
            mark("a")

    for program, count in [(without, 0), (with_one, 1)]:
        programs.append(program)
        follows.enqueue()
        execution = prepare(fetched())
        with CaptureQueriesContext(connection) as asked:
            get_broker().ack([execution.run(get_broker())])
        about_steps = [query["sql"] for query in asked if "step" in query["sql"] and "mark" not in query["sql"]]
        assert len(about_steps) == count, about_steps


# --- encrypted jobs


def test_the_results_of_encrypted_tasks_are_encrypted(in_secret):  # noqa: F811
    def program(context, secret):
        with context.step("a") as step:
            step.result = [secret]
        if context.attempt == 1:
            raise ValueError
        return step.result == [secret]

    run(program, "plain text", of=in_secret)
    assert "plain text" not in JobStep.objects.get().result
    again()
    assert Job.objects.get().state == "succeeded"
    assert len(JobStep.objects.all()) == 1


# --- async


def test_an_async_task_runs_functions_as_steps():
    async def program(context):
        charged = await context.astep("charge", mark, "charged")
        if context.attempt == 1:
            raise ValueError
        return charged, await context.astep("mail", mark, "mailed", key=1)

    run(program, of=follows_async)
    assert recorded() == [("charge", "")]
    assert again().result == '["charged","mailed"]'
    assert (marks(), recorded()) == (["charged", "mailed"], [("charge", ""), ("mail", "1")])


def test_an_async_run_that_lost_its_job_reports_nothing():
    async def program(context):
        try:
            await context.astep("charge", mark, "charged")
        except Exception:  # noqa: BLE001
            await context.astep("again", mark, "again")

    programs.append(program)
    follows_async.enqueue()
    execution = prepare(fetched("w1"))
    get_broker().lost(["w1"])
    assert asyncio.run(execution.arun(get_broker())) is None
    assert marks() == []


def test_a_record_is_refused_if_the_step_is_there_already():
    """Two records of one step would mean that its effects happened twice."""
    follows.enqueue()
    job = fetched()
    with transaction.atomic():
        get_broker().record_step(job, StepRecord(name="a"))
    with pytest.raises(Exception, match=r"(?i)unique|duplicate|recorded already"), transaction.atomic():
        get_broker().record_step(job, StepRecord(name="a"))
    with pytest.raises(ReservationLost), transaction.atomic():
        get_broker().record_step(msgspec.structs.replace(job, attempt=job.attempt + 1), StepRecord(name="b"))


def test_a_debugger_keeps_its_trace_function():
    calls = []

    def tracer(frame, event, _):
        calls.append(event)
        return tracer

    def program(context):
        with context.step("a"):
            mark("a")
        if context.attempt == 1:
            raise ValueError
        before.append(sys.gettrace())

    before = []
    run(program)
    outer = sys.gettrace()
    sys.settrace(tracer)
    try:
        again()
    finally:
        sys.settrace(outer)
    assert before == [tracer]
    assert marks() == ["a"]


# --- in tests of a project


def test_the_immediate_backend_skips_committed_steps_at_a_retry():
    def program(context):
        with context.step("a") as step:
            step.result = mark("a")
        if context.attempt == 1:
            raise ValueError
        return step.result

    programs.append(program)
    backend = {"BACKEND": "django_faktory.testing.backends.ImmediateBackend"}
    with override_settings(TASKS={"default": backend}), transaction.atomic():
        result = follows.enqueue()
    assert (result.return_value, marks()) == ("a", ["a"])


def test_a_job_that_is_started_over_has_no_steps():
    def program(context):
        with context.step("a"):
            mark("a")
        raise ValueError

    run(program)
    assert Job.objects.all().restart() == 1
    assert (Job.objects.get().state, recorded()) == ("enqueued", [])
    work()
    assert marks() == ["a", "a"]
    other = follows.enqueue()
    assert Job.objects.filter(jid=other.id).restart() == 0, "it waits for its first run"
