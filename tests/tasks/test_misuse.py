"""What people write first and is wrong: each gets an error of one line that says what to write."""

from contextlib import contextmanager, nullcontext

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import SynchronousOnlyOperation
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.template import Context, Engine

from django_faktory import Batch, push
from django_faktory.errors import BrokerUnavailable
from tests.project import tasks

pytestmark = pytest.mark.once_if_quick


@pytest.fixture
def in_coroutine(transactional_db):
    """Return a function that calls another one inside a running event loop."""

    def call(function):
        async def run():
            return function()

        return async_to_sync(run)()

    return call


@contextmanager
def without_table(name):
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {name} RENAME TO renamed_away")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE renamed_away RENAME TO {name}")


def enter(manager):
    with manager:
        pass


NAME = r"tests\.project\.tasks\.noop"


@pytest.mark.parametrize(
    ("misuse", "remedy"),
    [
        (lambda _: tasks.noop.enqueue(), rf"{NAME}\.enqueue: .* await .*\.aenqueue\(…\)"),
        (lambda _: tasks.noop.enqueue_many([()]), rf"{NAME}\.enqueue_many: .* await sync_to_async\("),
        (lambda result: tasks.noop.get_result(result.id), rf"{NAME}\.get_result: .* await .*\.aget_result\(…\)"),
        (lambda _: push("elsewhere"), r"push: .* await apush\(…\)"),
        (lambda result: result.refresh(), r"refresh: .* await .*\.arefresh\(\)"),
        (lambda result: result.wait(1), r"wait: .* await .*\.wait_async\(…\)"),
        (lambda result: result.cancel(), r"cancel: .* await .*\.acancel\(\)"),
        (lambda result: result.progress, r"progress: .* await sync_to_async\("),
        (lambda _: enter(Batch(success=tasks.noop)), r"with Batch\(…\): .* await sync_to_async\("),
        (lambda _: Batch.find("b-1"), r"Batch\.find: .* await sync_to_async\("),
    ],
)
def test_an_error_in_a_coroutine_names_what_to_await(in_coroutine, misuse, remedy):
    result = tasks.noop.enqueue()
    with pytest.raises(SynchronousOnlyOperation, match=f"^{remedy}") as caught:
        in_coroutine(lambda: misuse(result))
    assert "\n" not in str(caught.value)


def test_async_with_of_a_new_batch_says_what_to_write(in_coroutine):
    async def make():
        async with Batch(success=tasks.noop):
            pass

    with pytest.raises(TypeError, match=r"^async with Batch\(…\): .* await sync_to_async\("):
        async_to_sync(make)()


@pytest.mark.core
def test_a_call_of_the_task_itself_says_what_to_write():
    with pytest.raises(TypeError, match=rf"{NAME}: .* noop\.enqueue\(…\) .* noop\.call\(…\)"):
        tasks.noop()


@pytest.mark.core
def test_a_template_shows_a_task_and_does_not_call_it():
    assert "noop" in Engine().from_string("{{ task }}").render(Context({"task": tasks.noop}))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("is_atomic", [False, True])
def test_enqueue_before_migrate_says_to_migrate(is_atomic):
    def enqueue():
        with transaction.atomic() if is_atomic else nullcontext():
            tasks.noop.enqueue()

    with without_table("django_faktory_job"):
        for misuse in (enqueue, lambda: tasks.noop.get_result("x" * 32)):
            with pytest.raises(BrokerUnavailable, match=r"django_faktory_job.*; run manage\.py migrate$") as caught:
                misuse()
            assert "\n" not in str(caught.value)


@pytest.mark.django_db
def test_runfaktory_in_a_test_case_says_what_to_use():
    with pytest.raises(CommandError, match=r"open transaction of 'default'.*django_faktory\.testing\.drain\(\)"):
        call_command("runfaktory", "--drain")
    assert connection.is_usable()
