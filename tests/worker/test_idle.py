"""The cost of a worker: it sleeps while nothing can be due, and a plain job takes few calls."""

import logging
import threading
from collections import Counter
from pathlib import Path

import pytest

import django_faktory
from django_faktory.brokers import get_broker
from django_faktory.core.payloads import Beat, WorkerIdentity
from django_faktory.models import WorkerProcess
from django_faktory.store.notifier import PollingListener
from django_faktory.worker import job_log
from django_faktory.worker.interrupt import InterruptibleControl
from django_faktory.worker.job_monitor import DEFAULT_MONITOR_LIMITS, JobMonitor
from tests.project import tasks
from tests.waiting import wait_until
from tests.worker.blocking import gates, passes

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]

POLL_S = 600.0

MOST_CALLS = 58
"""Maximum number of Python calls of this package in the thread of a plain job; 57 are counted.

A job takes about 35 µs of processor time, and each call 0.2 µs.
"""


class Noted(PollingListener):
    """Record the timeout of each wait, and block until it is closed."""

    def __init__(self, *, receives_all):
        super().__init__()
        self.receives_all = receives_all
        self.waits = []
        self.is_waiting = threading.Event()

    def wait(self, timeout_s):
        self.waits.append(timeout_s)
        self.is_waiting.set()
        self._closed.wait()
        return False


@pytest.mark.parametrize(("receives_all", "wait_s"), [(True, 5 * POLL_S), (False, POLL_S)])
def test_an_idle_worker_polls_less_often_if_notifications_are_reliable(work, receives_all, wait_s):
    listener = Noted(receives_all=receives_all)
    work(listen=lambda: listener, poll_interval=POLL_S)
    assert listener.is_waiting.wait(60)
    assert listener.waits == [wait_s]


def test_a_heartbeat_takes_three_sql_statements(django_assert_num_queries):
    broker = get_broker()
    broker.hello(WorkerIdentity(wid="wid-idle"))
    with django_assert_num_queries(3):
        assert broker.beat([Beat(wid="wid-idle", rss_kb=7, held=())]) == [""]
    assert WorkerProcess.objects.get().rss_kb == 7


def test_short_jobs_do_not_wake_the_job_monitor_each_time():
    watch = JobMonitor(get_broker(), give_up=lambda *_: None)
    execution = type("Short", (), {"control": InterruptibleControl()})()
    watch.add(execution)
    watch.remove(execution)
    assert watch._pause_s() == pytest.approx(DEFAULT_MONITOR_LIMITS.query_every_s, abs=0.1)
    watch._due.clear()
    watch.add(execution)
    assert not watch._due.is_set()
    watch.remove(execution)
    watch._pause_s()
    assert watch._pause_s() is None
    watch.add(execution)
    assert watch._due.is_set()


def test_a_job_after_an_idle_period_wakes_the_job_monitor(work, state):
    running = work()
    wait_until(lambda: running.worker._thread_pool._monitor._is_asleep)
    result = passes.enqueue("rested")
    assert gates["rested"].begun.acquire(timeout=60)
    wait_until(lambda: not running.worker._thread_pool._monitor._is_asleep)
    gates["rested"].opened.set()
    state(result, "succeeded")
    state(tasks.noop.enqueue(), "succeeded")


def test_a_plain_job_takes_few_python_calls(work, caplog):
    """Timings depend on the machine, calls do not: each added call is a cost for every job."""
    for name in job_log.NAMES_OF_TASKS:  # Django 6 logs twice a job; what it calls of ours then is not counted
        caplog.set_level(logging.WARNING, logger=name)
    jobs, calls, package = 100, Counter(), str(Path(django_faktory.__file__).parent)
    for _ in range(jobs):
        tasks.noop.enqueue()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"] += 1

    threading.setprofile(
        lambda *seen: note(*seen) if threading.current_thread().name.startswith("faktory-job") else None
    )
    try:
        assert work(drain=True).ended()
    finally:
        threading.setprofile(None)
    assert calls["thread_pool.py:ThreadPool._perform"] == jobs
    assert calls.total() / jobs <= MOST_CALLS, calls.most_common(80)
