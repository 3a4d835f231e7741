"""What a step cannot be: one error, before its block runs, and the job is dead."""

import pytest
from django.db import transaction
from django.test import override_settings

from django_faktory import JobContext
from django_faktory.brokers import get_broker
from django_faktory.brokers.remote import RemoteBroker
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


@pytest.mark.parametrize(
    ("program", "part"),
    [
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


def test_steps_of_an_atomic_task_are_refused():
    assert "a task with atomic=True is one transaction" in message(run(nested, of=follows_atomically))


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


@pytest.mark.parametrize("where", ["on a Faktory server", "in another database"])
def test_steps_need_jobs_in_the_database_of_the_project(where):
    programs.append(nested)
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
