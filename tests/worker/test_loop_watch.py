"""A blocked event loop is logged with the job that blocks it, the stack and the duration."""

import asyncio
import threading

import pytest

from django_faktory.core.payloads import Ack, Reservation
from django_faktory.worker.async_runner import EventLoop
from tests.waiting import wait_until

pytestmark = pytest.mark.core


@pytest.fixture
def loop():
    running = EventLoop()
    yield running
    assert running.close(10)


@pytest.fixture
def opened():
    """Event that a blocking coroutine waits for."""
    found = threading.Event()
    yield found
    found.set()


def begin(loop, make, jid):
    job = Reservation(jid=jid, queue="default", text="{}", wid="w", attempt=1, jobtype="app.blocks")
    ended = threading.Event()

    async def run():
        await make()
        return Ack(jid=jid)

    loop.submit(job, run, lambda _: ended.set())
    return ended


def logged(caplog, words, jid):
    """Return the messages about this job only: the loop of an earlier test may log more."""
    found = [record.getMessage() for record in list(caplog.records)]
    return [text for text in found if words in text and jid in text]


def test_a_job_that_blocks_the_event_loop_is_logged_with_its_stack(loop, opened, caplog):
    async def blocks_it():
        opened.wait(60)

    async def waits():
        await asyncio.sleep(0.01)

    ended = begin(loop, blocks_it, "job-blocks")
    other = begin(loop, waits, "job-waits")
    [text] = wait_until(lambda: logged(caplog, "event loop is blocked", "job-blocks"))
    assert "jobtype=app.blocks jid=job-blocks" in text
    assert "in blocks_it" in text
    assert not other.is_set()
    opened.set()
    assert ended.wait(60)
    [text] = wait_until(lambda: logged(caplog, "event loop answers again", "job-blocks"))
    assert "jid=job-blocks" in text
    assert other.wait(60)


def test_the_blocked_loop_warning_is_repeated_at_growing_intervals(loop, opened, caplog):
    async def blocks_it():
        opened.wait(60)

    begin(loop, blocks_it, "job-goes-on")
    [first, second] = wait_until(
        lambda: found if len(found := logged(caplog, "loop is blocked", "job-goes-on")) == 2 else None, 30
    )
    assert "blocked=1." in first
    assert float(second.partition("blocked=")[2].partition(" s")[0]) >= 3.0


def test_a_blocking_asyncio_task_is_attributed_to_the_running_jobs(loop, opened, caplog):
    async def blocks_it():
        opened.wait(60)

    async def starts_another():
        await asyncio.gather(asyncio.create_task(blocks_it()))

    begin(loop, starts_another, "job-parent")
    [text] = wait_until(lambda: logged(caplog, "event loop is blocked", "job-parent"))
    assert "jids=job-parent" in text
    assert "in blocks_it" in text


def test_coroutines_that_await_are_not_logged_as_blocking(loop, caplog):
    async def waits():
        for _ in range(150):
            await asyncio.sleep(0.01)

    assert begin(loop, waits, "job-waits").wait(60)
    assert not logged(caplog, "event loop", "job-waits")
