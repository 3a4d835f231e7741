"""A project for mypy to check. A comment with E and codes lists the errors a line must have; other lines have none."""

from datetime import timedelta
from typing import Any, assert_type

from django_faktory import JobContext, task
from django_faktory.tasks.base import FaktoryTask
from django_faktory.tasks.compat import TaskResult


@task
def add(first: int, second: int = 0) -> int:
    return first + second


@task(queue_name="mail", max_attempts=5, retry_on=[ConnectionError], unique_for=60, timeout=30)
def send(address: str, *, urgent: bool = False) -> None: ...


@task(takes_context=True)
def report(context: JobContext, month: str) -> dict[str, int]:
    return {month: context.attempt}


@task
async def fetch(url: str) -> str:
    return url


@task(takes_context=True, priority=10)
async def crawl(context: JobContext, url: str) -> list[str]:
    return [url, context.task_result.id]


# --- correct code

assert_type(add.enqueue(1, second=2).return_value, int)
add.enqueue(1)
send.enqueue("a@example.com", urgent=True)
send.using(run_after=timedelta(hours=1), priority=5).enqueue("a@example.com")
report.enqueue("May")
fetch.enqueue("https://example.com")
crawl.enqueue("https://example.com")
add.enqueue_many([(1, 2), {"first": 1}])
assert_type(report.get_result("some-jid").return_value, dict[str, int])
assert_type(add.enqueue(1).wait(timeout=5).return_value, int)
assert_type(add.get_result("some-jid").cancel(), bool)


async def in_a_view() -> None:
    assert_type((await add.aenqueue(1)).return_value, int)
    await report.aenqueue("May")
    await fetch.aenqueue("https://example.com")
    assert_type((await (await add.aenqueue(1)).wait_async(5)).return_value, int)
    await add.aenqueue("1")  # E: arg-type
    await fetch.aenqueue(url=1)  # E: arg-type


def takes_any_task(some: FaktoryTask[..., Any]) -> TaskResult[..., Any]:
    return some.enqueue()


takes_any_task(add)

# --- wrong code

add.enqueue("1")  # E: arg-type
add.enqueue()  # E: call-arg
add.enqueue(1, 2, 3)  # E: call-arg
add.enqueue(1, third=3)  # E: call-arg
add.using(priority=1).enqueue("1")  # E: arg-type
send.enqueue("a@example.com", True)  # E: call-arg
report.enqueue(5)  # E: arg-type
report.enqueue()  # E: call-arg
crawl.enqueue(b"bytes")  # E: arg-type
add.using(queue="mail")  # E: call-arg


@task(max_attempts="5")  # E: call-overload, untyped-decorator
def wrong_value() -> None: ...


@task(no_such_option=1)  # E: call-overload, untyped-decorator
def wrong_option() -> None: ...


@task(takes_context=True)  # E: arg-type
def without_context(month: str) -> None: ...
