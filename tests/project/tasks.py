"""Tasks of the test project: one for each way a task can end. Tests of several folders use them."""

import asyncio
import contextvars
from contextlib import suppress

from asgiref.sync import sync_to_async
from django.core.cache import caches
from django.db import DatabaseError, connection, transaction
from django.utils import timezone, translation

from django_faktory import Discard, Kill, Retry, task
from django_faktory.tasks import tracing
from tests.project.models import Mark


@task
def noop():
    pass


@task
def add(a, b):
    return a + b


@task
def echo(*args, **kwargs):
    return {"args": args, "kwargs": kwargs}


@task
async def async_add(a, b):
    await asyncio.sleep(0)
    return a + b


@task
async def async_fails(text="no luck"):
    await asyncio.sleep(0)
    raise ValueError(text)


@task(takes_context=True)
async def async_takes_context(context, value):
    return {"attempt": context.attempt, "id": context.task_result.id, "value": value}


@task
def fails(text="no luck"):
    raise ValueError(text)


@task(max_attempts=1)
def fails_for_good(text="no luck"):
    raise ValueError(text)


@task(takes_context=True, max_attempts=5)
def flaky(context, failures):
    """Fail `failures` times, each with an immediate retry, then succeed."""
    if context.attempt <= failures:
        raise Retry(f"attempt {context.attempt} of {failures} fails", in_s=0)
    return context.attempt


@task(takes_context=True)
def takes_context(context, value):
    return {"attempt": context.attempt, "id": context.task_result.id, "value": value}


@task
def returns_unserializable():
    return object()


@task
def returns(value):
    return value


@task
def writes_mark(text):
    Mark.objects.create(text=text)


@task(atomic=True)
def writes_mark_atomically(text):
    Mark.objects.create(text=text)
    return text


@task(atomic=True)
def does_atomically(what):
    if what == "a hook":
        transaction.on_commit(lambda: None)
    elif what == "a look":
        Mark.objects.exists()


@task(atomic=True, max_attempts=2)
def writes_mark_atomically_and(text, then):
    """Write a row, then end in the way that `then` names."""
    Mark.objects.create(text=text)
    match then:
        case "fails":
            raise ValueError(text)
        case "returns nothing that JSON knows":
            return object()
        case "enqueues":
            noop.enqueue()
        case "enqueues and fails":
            noop.enqueue()
            raise ValueError(text)
        case "hooks that fail":
            transaction.on_commit(lambda: 1 / 0)
        case "leaves a transaction open":
            transaction.atomic().__enter__()
        case "gives its transaction up":
            transaction.set_rollback(True)
        case "breaks the transaction and goes on":
            with suppress(DatabaseError), connection.cursor() as cursor:
                cursor.execute("SELECT * FROM no_such_table")
        case "breaks a savepoint and goes on":
            with suppress(DatabaseError), transaction.atomic(), connection.cursor() as cursor:
                cursor.execute("SELECT * FROM no_such_table")
    return None


@task
def leaves_transaction_open(text):
    """Break the rules: begin a transaction and never end it."""
    transaction.atomic().__enter__()
    Mark.objects.create(text=text)


@task
def switches_autocommit_off(text, then=""):
    transaction.set_autocommit(False)
    Mark.objects.create(text=text)
    match then:
        case "commits":
            transaction.commit()
        case "rolls back":
            transaction.rollback()
        case "fails":
            raise ValueError(text)


@task
async def async_switches_autocommit_off(text, then=""):
    await sync_to_async(switches_autocommit_off.func)(text, then)


@task
async def async_writes_mark(text):
    await Mark.objects.acreate(text=text)


@task(max_attempts=1)
def breaks_the_connection():
    """Raise a database error that leaves the connection marked as broken."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM no_such_table")


@task(queue_name="mail", priority=10, max_attempts=5)
def send_invoice(invoice_id):
    return f"invoice {invoice_id}"


@task(name="billing.charge", max_attempts=3, reserve_for=120, result_ttl=60, backtrace=5)
def charge(amount):
    return amount


@task
def asks_for_retry(in_s=None):
    raise Retry("not yet", in_s=in_s)


@task
def asks_for_discard():
    raise Discard("no longer needed")


@task
def asks_for_kill():
    raise Kill("needs inspection")


def linear_backoff(exception, task_result):
    return 7 * task_result.attempts


def broken_backoff(exception, task_result):
    raise RuntimeError("the backoff itself fails")


@task(backoff=linear_backoff, max_attempts=3)
def fails_with_backoff(text="no luck"):
    raise ValueError(text)


@task(backoff=broken_backoff)
def fails_with_broken_backoff():
    raise ValueError("no luck")


@task(retry_on=[ConnectionError])
def retries_only_connection_errors(kind):
    raise {"connection": ConnectionResetError, "value": ValueError}[kind](kind)


@task
def exits():
    raise SystemExit(3)


@task
def interrupts():
    raise KeyboardInterrupt


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("even this fails")


@task
def fails_unprintably():
    raise UnprintableError


current_tenant = contextvars.ContextVar("current_tenant", default="none")


@task
def sets_context_variable():
    seen = current_tenant.get()
    current_tenant.set("acme")
    return seen


@task
def returns_its_cache():
    return id(caches["default"])


waiting = []


@task
async def never_ends_async():
    waiting[-1].set()
    await asyncio.Event().wait()


@task
def fails_deep_down(depth):
    """Recurse through two functions, because a traceback abbreviates only repetitions of the same frame."""
    return _down(depth)


def _down(depth):
    if depth == 0:
        raise ValueError("bottom")
    return _further_down(depth - 1)


def _further_down(depth):
    return _down(depth)


wishes = []


@task
def asks_for_odd_retry():
    raise Retry("not yet", in_s=wishes.pop())


@task(discard_on=LookupError)
def discards_lookup_errors():
    raise KeyError("gone")


@task(backoff=lambda exception, task_result: None)
def fails_with_modest_backoff():
    raise ValueError("no luck")


@task
def opens_transaction_and_fails():
    transaction.atomic().__enter__()
    raise ValueError("no luck")


@task(max_attempts=1)
async def async_breaks_the_connection():
    await sync_to_async(breaks_the_connection.func)()


@sync_to_async
def sees_trouble():
    """True if the connection of the thread that serves async tasks is marked as broken."""
    return connection.connection is not None and connection.errors_occurred


# --- arguments, context, limits


@task(result_ttl=600)
def returns_types(*args, **kwargs):
    return {
        "args": [type(value).__name__ for value in args],
        "kwargs": {name: type(value).__name__ for name, value in kwargs.items()},
    }


@task
async def async_returns_types(*args):
    await asyncio.sleep(0)
    return [type(value).__name__ for value in args]


@task(takes_context=True)
def returns_its_arguments(context, *args):
    return context.task_result.args


@task(missing="discard")
def drops_missing_row(row):
    pass


@task(atomic=True)
def writes_name_atomically(row):
    Mark.objects.create(text=f"{row.name} in transaction: {connection.in_atomic_block}")


@task(unique_for=60)
def once_a_group(group):
    pass


@task(plain_json=True)
def takes_plain_json(value):
    return value


@task
def returns_its_context():
    return [
        translation.get_language(),
        timezone.get_current_timezone_name(),
        tracing.request_id.get(),
        tracing.traceparent.get(),
    ]


@task
async def returns_its_context_async():
    await asyncio.sleep(0)
    return returns_its_context.func()


@task
def enqueues_another():
    return returns_its_context.enqueue().id


def noticing():
    """Do nothing; tests replace this function."""


@task
def calls_noticing():
    noticing()
