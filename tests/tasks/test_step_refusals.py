"""What a step cannot be: one error, before its block runs, and the job is dead."""

import pytest
from django.db import transaction
from django.test import override_settings

from django_faktory import JobContext, Later
from django_faktory.brokers import get_broker
from django_faktory.brokers.remote import RemoteBroker
from django_faktory.core.payloads import interruption_failure
from django_faktory.errors import InvalidStep
from django_faktory.models import Job, JobStep
from django_faktory.worker.execution import prepare
from tests.tasks.programs import again, follows, follows_async, follows_atomically, mark, marks, message, programs, run
from tests.tasks.work import fetched

pytestmark = pytest.mark.django_db(transaction=True)


def twice(context):
    for _ in range(2):
        with context.step("a"):
            mark("a")


def nested(context):
    with context.step("a"):
        mark("a")
        with context.step("b"):
            mark("b")


def in_a_transaction(context):
    with transaction.atomic(), context.step("a"):
        mark("a")


def before_a_second_manager(context):
    with context.step("a"), transaction.atomic():
        mark("a")


def with_a_large_result(context):
    with context.step("a") as step:
        mark("a")
        step.result = "x" * 1024 * 1024


def with_an_object_as_result(context):
    with context.step("a") as step:
        mark("a")
        step.result = object()


def without_a_name(context):
    with context.step(""):
        mark("a")


def with_a_long_key(context):
    with context.step("a", key="x" * 256):
        mark("a")


def on_one_line(context):
    with context.step("a"): mark("a")  # fmt: skip  # noqa: E701


def beginning_with_try(context):
    with context.step("a"):
        try:
            mark("a")
        finally:
            mark("b")


def sleeping_in_a_step(context):
    with context.step("a"):
        mark("a")
        context.sleep(hours=1)


def waiting_in_a_walk(context):
    with context.each([1], key=int) as rows:
        for _ in rows:
            mark("a")
            context.wait_for("b")


def sleeping_in_a_transaction(context):
    with transaction.atomic():
        mark("a")
        context.sleep(hours=1)


def waiting_in_a_transaction(context):
    with transaction.atomic():
        mark("a")
        context.wait_for("b")


def waiting_twice(context):
    get_broker().signal(context.task_result.id, "b", "1")
    context.wait_for("b")
    context.wait_for("b")


def sleeping_before_now(context):
    context.sleep(hours=-1)


def waiting_for_ages(context):
    context.wait_for("b", timeout=1e12)


def waiting_for_nothing(context):
    context.wait_for("")


@pytest.mark.parametrize(
    ("program", "part"),
    [
        (sleeping_in_a_step, "sleep 'sleep': step 'a' is open"),
        (waiting_in_a_walk, "wait 'b': each 'each' is open"),
        (sleeping_in_a_transaction, "sleep 'sleep': a transaction is open"),
        (waiting_in_a_transaction, "wait 'b': a transaction is open"),
        (waiting_twice, "wait 'b': this run had it already; give steps in a loop a key="),
        (
            sleeping_before_now,
            "sleep 'sleep': expected a time of 0 seconds to 10 years, got datetime.timedelta(days=-1",
        ),
        (waiting_for_ages, "wait 'b': expected a time of 0 seconds to 10 years, got 1000000000000.0"),
        (waiting_for_nothing, "wait: expected a name of 1 to 100 printable characters, got ''"),
        (twice, "step 'a': this run had it already; give steps in a loop a key="),
        (nested, "step 'b': step 'a' is open"),
        (in_a_transaction, "step 'a': a transaction is open"),
        (before_a_second_manager, "step 'a': a later run could not skip its block"),
        (with_a_large_result, "step 'a': result: expected at most 1,048,576 bytes of JSON, got 1,048,578"),
        (with_an_object_as_result, "step 'a': result: Unsupported type"),
        (without_a_name, "step: expected a name of 1 to 100 printable characters, got ''"),
        (with_a_long_key, "step 'a': expected a key of at most 255 printable characters"),
        (on_one_line, "step 'a': a later run could not skip its block"),
        (beginning_with_try, "begin the block on the next line, not with `try:`"),
    ],
)
def test_misuse_is_one_error_that_kills_the_job(program, part):
    report = run(program)
    assert part in message(report)
    assert report.errtype == "django_faktory.errors.InvalidStep"
    assert Job.objects.get().state == "dead"
    assert marks() == (["a"] if program is twice else [])


@pytest.mark.parametrize("program", [nested, sleeping_in_a_step, lambda context: context.wait_for("b")])
def test_steps_and_waits_of_an_atomic_task_are_refused(program):
    assert "a task with atomic=True is one transaction" in message(run(program, of=follows_atomically))


def test_a_time_before_now_is_refused_by_later():
    with pytest.raises(ValueError, match="expected a time of 0 seconds to 10 years, got"):
        Later(minutes=-1)


@pytest.mark.parametrize(("verb", "instead"), [("sleep", "asleep(…)"), ("wait_for", "await_for('b')")])
def test_a_sleep_in_a_coroutine_names_what_to_write(verb, instead):
    async def program(context):
        context.sleep(hours=1) if verb == "sleep" else context.wait_for("b")

    assert f"write `await context.{instead}`" in message(run(program, of=follows_async))


def test_another_server_gets_later_as_a_failure_that_names_the_reason():
    def program(_):
        raise Later(minutes=5)

    programs.append(program)
    follows.enqueue()
    report = prepare(fetched()).run(get_broker())
    failure = interruption_failure(report)
    assert (failure.errtype, failure.message) == (
        "Later", "runs again after 300 s; only jobs in this project's database can, so this counts as a failure"
    )  # fmt: skip


def test_a_step_in_a_coroutine_names_astep():
    async def program(context):
        with context.step("a"):
            mark("a")

    assert "write `await context.astep('a', function, …)`" in message(run(program, of=follows_async))


def test_a_coroutine_as_a_step_is_refused():
    async def program(context):
        async def charge(): ...

        await context.astep("a", charge)

    assert "expected a plain function, got a coroutine" in message(run(program, of=follows_async))


def test_the_number_of_steps_is_bounded():
    def program(context):
        runs.append(1)
        with context.step("a", key=len(runs)):
            mark("a")
        raise ValueError

    runs = []
    run(program)
    first = JobStep.objects.get()
    JobStep.objects.bulk_create(
        JobStep(
            **{field.attname: getattr(first, field.attname) for field in JobStep._meta.local_concrete_fields}
            | {"key": f"k{n}"}
        )
        for n in range(9_998)
    )
    assert message(again()) == "ValueError"
    assert "step 'a' with key '3': expected at most 10,000 steps in a job" in message(again())
    assert (len(marks()), JobStep.objects.count()) == (2, 10_000)


@pytest.mark.parametrize("program", [nested, lambda context: context.sleep(hours=1), lambda c: c.wait_for("b")])
@pytest.mark.parametrize("where", ["on a Faktory server", "in another database"])
def test_steps_and_waits_need_jobs_in_the_database_of_the_project(where, program):
    programs.append(program)
    follows.enqueue()
    execution = prepare(fetched())
    if where == "on a Faktory server":
        report = execution.run(RemoteBroker("tcp://127.0.0.1:1"))
        assert "need their jobs in this project's database" in message(report)
    else:
        broker = get_broker()
        with override_settings(FAKTORY={"DATABASE": "other"}):
            report = execution.run(broker)
        assert "the jobs are not in the database of 'default'" in message(report)
    assert marks() == []


def test_a_context_without_a_job_refuses_steps():
    with pytest.raises(InvalidStep, match="run the task by a worker or in a test by drain"):
        JobContext(task_result=None).step("a")
