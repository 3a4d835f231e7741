"""Invalid tasks are refused when decorated or enqueued, and the message explains how to fix it."""

import functools
import subprocess
import sys
from datetime import datetime, timedelta

import pytest
from django.test import override_settings

from django_faktory import task
from django_faktory.tasks.compat import InvalidTask
from tests.project import tasks

pytestmark = pytest.mark.once

BACKEND = "django_faktory.backend.FaktoryBackend"


def plain():
    pass


def yields():
    yield 1


async def yields_async():
    yield 1


async def waits(exception, task_result):
    return 1


class Shop:
    def order(self, number):
        pass

    @staticmethod
    def is_static(number):
        return number


def refused(pattern):
    return pytest.raises(InvalidTask, match=pattern)


def test_a_task_defined_in_the_main_program_is_refused():
    code = (
        "import django; django.setup()\n"
        "from django_faktory import task\n"
        "def f(): pass\n"
        "try: task(f)\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "task __main__.f: it is defined in the main program" in done.stdout
    assert "move it to a module" in done.stdout


def test_a_nested_function_is_refused():
    def inner():
        pass

    with refused(r"inner: .*module level\. A worker finds it by its name: move it out"):
        task(inner)


@pytest.mark.parametrize("what", [functools.partial(plain), Shop().order, print, Shop])
def test_an_object_that_is_not_a_function_is_refused(what):
    with refused("module level"):
        task(what)


def test_a_method_is_refused():
    with refused(r"Shop\.order: expected a function, got a method: a job has no self"):
        task(Shop.order)


def test_a_static_method_is_accepted():
    assert task(Shop.is_static).jobtype.endswith("Shop.is_static")


@pytest.mark.parametrize("func", [yields, yields_async])
def test_a_generator_function_is_refused(func):
    with refused("expected a function that returns, got a generator"):
        task(func)


def test_a_coroutine_as_backoff_is_refused():
    with refused("backoff: expected a function, not a coroutine"):
        task(backoff=waits)(plain)


def test_a_coroutine_that_is_atomic_is_refused():
    with refused("atomic=True: expected a plain function, got a coroutine"):
        task(atomic=True)(waits)


def test_a_naive_run_after_is_refused_with_the_remedy():
    with refused(r"tests\.project\.tasks\.noop: run_after must be an aware datetime\. Pass a timedelta"):
        tasks.noop.using(run_after=datetime.now() + timedelta(hours=1))  # noqa: DTZ005  (it is what is refused)


def test_an_unknown_queue_is_refused_at_enqueue_with_the_known_queues():
    strict = {"default": {"BACKEND": BACKEND, "QUEUES": ["mail", "low"]}}
    with (
        override_settings(TASKS=strict),
        refused(r"Queue 'default' is not valid for backend\..* has low, mail: add it"),
    ):
        tasks.noop.enqueue()


@pytest.mark.parametrize("priority", ["high", None, [1]])
def test_a_non_integer_priority_is_refused(priority):
    with refused("priority: expected a whole number from -100 to 100"):
        task(priority=priority)(plain)


def test_a_missing_context_argument_is_refused_with_the_remedy():
    with refused(r"'context'\. Make it the first argument: def task\(context, …\)"):
        task(takes_context=True)(plain)
