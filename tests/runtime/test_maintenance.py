"""Time-based work on every node. Rules: W13, W18 to W20, and one failed step does not stop the loop."""

import math
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import connection, connections, transaction
from django.test import override_settings
from django.utils import timezone

from django_faktory.core.payloads import Beat, WorkerIdentity
from django_faktory.errors import BrokerUnavailable
from django_faktory.models import Job, Tracking, WorkerProcess
from django_faktory.runtime import maintenance
from django_faktory.runtime.maintenance import Maintenance
from django_faktory.store import workers
from django_faktory.store.jobs import pushes
from django_faktory.store.maintenance import due as due_work
from django_faktory.store.notifier import publisher
from django_faktory.store.notifier.base import ANY_QUEUE
from django_faktory.store.store import Store
from tests.factories import JobFactory, WorkerFactory, payload
from tests.waiting import wait_until

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]


def ago(**time):
    return timezone.now() - timedelta(**time)


def test_one_run_executes_every_maintenance_step():
    due = JobFactory(scheduled=True, run_at=ago(seconds=1))
    later = JobFactory(scheduled=True, run_at=timezone.now() + timedelta(hours=1))
    overdue = JobFactory(working=True, reserved_until=ago(seconds=1), wid="")
    old = JobFactory(dead=True, purge_at=ago(seconds=1))
    Maintenance("default").run_once()
    states = dict(Job.objects.values_list("pk", "state"))
    assert states == {due.pk: "enqueued", later.pk: "scheduled", overdue.pk: "retries"}
    assert old.pk not in states


def test_expired_jobs_are_deleted_in_chunks_and_logged_once(caplog):
    Job.objects.bulk_create(JobFactory.many(due_work.CHUNK + 1, expires_at=ago(seconds=1)))
    kept = JobFactory(expires_at=timezone.now() + timedelta(hours=1))
    with caplog.at_level("INFO", logger="django_faktory.runtime.maintenance"):
        Maintenance("default").run_once()
    assert [record.getMessage() for record in caplog.records] == [
        "jobs waited past their expires_in and are dropped jobs=501"
    ]
    assert Job.objects.get() == kept


def test_tracking_records_are_deleted_after_30_minutes():
    Tracking.objects.create(jid="job-long-gone", percent=1, updated_at=ago(minutes=31))
    Tracking.objects.create(jid="job-just-gone", percent=1, updated_at=ago(minutes=29))
    Maintenance("default").run_once()
    assert Tracking.objects.get().jid == "job-just-gone"


def test_a_due_job_is_enqueued_and_its_queue_is_notified(start_maintenance):
    announced, heard = [], threading.Event()
    start_maintenance(on_work=lambda queues: (announced.append(queues), heard.set()))
    at = timezone.now() + timedelta(seconds=0.4)
    pushes.push(Store(), [payload(at=at, queue="mail")])
    assert heard.wait(60)
    row = Job.objects.get()
    assert (row.state, announced) == ("enqueued", [{"mail"}])
    assert row.enqueued_at >= at


def test_an_earlier_due_job_of_this_node_interrupts_the_sleep(start_maintenance):
    """W13: the sleep is one hour here, so only the alarm can end it."""
    heard = threading.Event()
    loop = start_maintenance(
        on_work=lambda queues: queues and heard.set(), max_sleep_s=3600.0
    )  # None: another node may have enqueued jobs, so fetchers look once too often
    wait_until(lambda: loop._wake_at < math.inf)
    at = timezone.now() + timedelta(seconds=0.3)
    pushes.push(Store(), [payload(at=at)])
    loop.wake_by(at)
    assert heard.wait(60)
    assert Job.objects.get().enqueued_at >= at


def test_due_jobs_do_not_wait_for_the_daily_recount(start_maintenance, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()

    def recount(**_):
        begun.set()
        may_end.wait(60)

    monkeypatch.setattr(maintenance.deltas, "recount", recount)
    start_maintenance()
    try:
        assert begun.wait(60)
        job = JobFactory(scheduled=True, run_at=ago(seconds=1))
        wait_until(lambda: Job.objects.get(pk=job.pk).state == "enqueued")
    finally:
        may_end.set()


def test_a_job_due_after_the_sleep_does_not_interrupt_it(start_maintenance):
    loop = Maintenance("default")
    loop._wake_at = time.monotonic() + 1
    loop.wake_by(timezone.now() + timedelta(seconds=60))
    assert not loop._alarm.is_set()
    loop.wake_by(timezone.now() + timedelta(seconds=0.5))
    assert loop._alarm.is_set()


def test_fetchers_are_woken_for_a_due_job_that_another_node_enqueued(monkeypatch):
    """Without notifications between nodes, fetchers learn of such a job from maintenance (W13)."""
    announced = []
    loop = Maintenance("default", on_work=announced.append)
    job = JobFactory(scheduled=True, run_at=timezone.now() + timedelta(seconds=60))
    loop._enqueue_due()
    assert announced == []
    Job.objects.filter(pk=job.pk).update(run_at=ago(seconds=1))
    assert due_work.enqueue_due(Store()), "the other node"
    monkeypatch.setattr(maintenance, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 61))
    loop._enqueue_due()
    loop._enqueue_due()
    assert announced == [None]


def test_a_node_looks_again_soon_while_another_enqueues_due_jobs():
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("one writer at a time: the second waits")
    announced = []
    loop = Maintenance("default", on_work=announced.append)
    JobFactory(scheduled=True, run_at=ago(seconds=1))

    def look():
        waits.append(loop._enqueue_due())
        connections.close_all()

    waits = []
    with transaction.atomic():
        assert due_work.enqueue_due(Store())
        busy = threading.Thread(target=look)
        busy.start()
        busy.join(30)  # it waits for no lock
        assert waits == [maintenance.RECHECK_DUE_S]
    loop._enqueue_due()
    assert announced == [None]


def test_a_worker_without_heartbeats_is_declared_lost_and_reported():
    """W20: its jobs return to the queue, and the callback gets its wid."""
    named = []
    workers.register(Store(), [WorkerIdentity(wid="silent")])
    workers.register(Store(), [WorkerIdentity(wid="lively")])
    workers.register(Store(), [WorkerIdentity(wid="never-beat")])
    workers.beat(Store(), [Beat(wid="silent"), Beat(wid="lively")])
    held = {wid: JobFactory(working=True, wid=wid) for wid in ("silent", "lively", "never-beat")}
    Job.objects.update(reserved_until=timezone.now() + timedelta(hours=1))
    WorkerProcess.objects.filter(wid="silent").update(beat_at=ago(seconds=61))
    Maintenance("default", on_lost=named.extend).run_once()
    assert named == ["silent"]
    assert {wid: Job.objects.get(pk=job.pk).state for wid, job in held.items()} == {
        "silent": "enqueued",
        "lively": "working",
        "never-beat": "working",
    }
    assert set(WorkerProcess.objects.values_list("wid", flat=True)) == {"lively", "never-beat"}


def test_a_lost_workers_job_with_an_expired_reservation_counts_as_lost():
    ago = timezone.now() - timedelta(seconds=300)
    WorkerFactory(wid="w1", beat_at=ago)
    job = JobFactory(state="working", wid="w1", attempt=1, started_at=ago, reserved_until=ago, retry=0)
    Maintenance("default").run_once()
    job.refresh_from_db()
    assert (job.state, job.losses, job.failures) == ("enqueued", 1, 0)


def test_a_resumed_node_waits_for_heartbeats_before_it_declares_workers_lost(monkeypatch):
    times = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    now = [1000.0]
    monkeypatch.setattr(maintenance, "time", times)
    house = Maintenance("default")
    for _ in range(40):
        now[0] += 1
        house._round()
    WorkerFactory(wid="w1", beat_at=timezone.now() - timedelta(seconds=300))
    now[0] += 300  # as after SIGSTOP and SIGCONT
    house._round()
    assert WorkerProcess.objects.exists()
    for _ in range(40):
        now[0] += 1
        house._round()
    assert not WorkerProcess.objects.exists()


def test_after_an_outage_workers_have_time_for_a_heartbeat_before_being_lost(monkeypatch):
    """W20: while no node ran, or the database was unavailable, no heartbeat could be recorded."""
    WorkerFactory(wid="not heard", beat_at=ago(seconds=300))
    loop = Maintenance("default")
    loop._round()
    assert WorkerProcess.objects.exists(), "the node has just started"
    with monkeypatch.context() as patched:
        patched.setattr(maintenance, "find_pending_work", fail_with(BrokerUnavailable("unavailable")))
        loop._listens_since -= maintenance.HEARD_WITHIN_S
        loop._round()
    loop._check_all_at = time.monotonic()
    loop._round()
    assert WorkerProcess.objects.exists(), "the database has just become available"
    loop._listens_since -= maintenance.HEARD_WITHIN_S
    loop._check_all_at = time.monotonic()
    loop._round()
    assert not WorkerProcess.objects.exists()


def fail_with(error):
    def fail(**_):
        raise error

    return fail


def test_a_job_claimed_by_an_already_lost_worker_is_requeued():
    """W20: the claim was in progress when the worker was killed and declared lost."""
    orphan = JobFactory(working=True, wid="given-up", started_at=ago(seconds=11))
    on_its_way = JobFactory(working=True, wid="given-up", started_at=ago(seconds=1))
    nameless = JobFactory(working=True, wid="", started_at=ago(seconds=11))
    Job.objects.update(reserved_until=timezone.now() + timedelta(hours=1))
    Maintenance("default").run_once()
    states = dict(Job.objects.values_list("pk", "state"))
    assert states == {orphan.pk: "enqueued", on_its_way.pk: "enqueued", nameless.pk: "working"}


def test_worker_timeout_sets_when_a_worker_is_declared_lost():
    WorkerFactory(wid="slow", beat_at=ago(seconds=90))
    with override_settings(FAKTORY={"WORKER_TIMEOUT": 120}):
        Maintenance("default").run_once()
        assert WorkerProcess.objects.exists()
    Maintenance("default").run_once()
    assert not WorkerProcess.objects.exists()


def test_a_worker_that_never_sent_a_heartbeat_keeps_the_job_it_holds():
    """W20: its jobs are held until their reservations end."""
    WorkerFactory(wid="old-style", seen_at=ago(hours=2))
    job = JobFactory(working=True, wid="old-style", started_at=ago(hours=2))
    Job.objects.update(reserved_until=timezone.now() + timedelta(hours=1))
    Maintenance("default").run_once()
    Maintenance("default").run_once()
    assert Job.objects.get(pk=job.pk).state == "working"


def test_an_idle_worker_without_any_heartbeat_is_eventually_removed():
    WorkerFactory(seen_at=ago(hours=2))
    WorkerFactory(wid="recent", seen_at=ago(minutes=30))
    Maintenance("default").run_once()
    assert [worker.wid for worker in WorkerProcess.objects.all()] == ["recent"]


def test_one_run_processes_more_than_one_chunk():
    many = due_work.CHUNK + 5
    Job.objects.bulk_create(JobFactory.many(many, scheduled=True, run_at=ago(seconds=5)))
    Job.objects.bulk_create(JobFactory.many(many, dead=True, purge_at=ago(seconds=5)))
    Maintenance("default").run_once()
    assert Job.objects.filter(state="enqueued").count() == many
    assert not Job.objects.filter(state="dead").exists()


def test_two_concurrent_nodes_enqueue_each_due_job_once(start_maintenance):
    JobFactory.create_batch(40, scheduled=True, run_at=ago(seconds=5))
    start_maintenance()
    start_maintenance()
    wait_until(lambda: Job.objects.filter(state="enqueued").count() == 40)
    assert Job.objects.count() == 40


@pytest.mark.parametrize("error", [RuntimeError("a bug"), BrokerUnavailable("database unavailable: gone")])
def test_a_failing_step_stops_neither_the_loop_nor_the_other_steps(start_maintenance, monkeypatch, error, caplog):
    failed = threading.Event()

    def broken(*_, **__):
        failed.set()
        raise error

    monkeypatch.setattr(maintenance.failures, "reap", broken)
    JobFactory(scheduled=True, run_at=ago(seconds=1))
    old = JobFactory(dead=True, purge_at=ago(seconds=1))
    start_maintenance()
    assert failed.wait(60)
    wait_until(lambda: not Job.objects.filter(pk=old.pk).exists())
    assert Job.objects.get().state == "enqueued"
    assert "reservations" in caplog.text


def test_overdue_work_found_by_a_look_is_handled_in_the_same_round():
    """W19, W20: expired reservations, workers and jobs are found within the interval between two looks."""
    loop = Maintenance("default")
    loop._round()
    loop._listens_since -= maintenance.HEARD_WITHIN_S
    overdue = JobFactory(working=True, reserved_until=ago(seconds=1), wid="")
    WorkerFactory(wid="silent", beat_at=ago(seconds=61))
    late = JobFactory(expires_at=ago(seconds=1))
    loop._check_all_at = time.monotonic()
    loop._round()
    assert Job.objects.get(pk=overdue.pk).state == "retries"
    assert not WorkerProcess.objects.exists()
    assert not Job.objects.filter(pk=late.pk).exists()
    assert maintenance.CHECK_ALL_EVERY_S + maintenance.LONGEST_SLEEP_S < 5


def test_jobs_requeued_from_lost_workers_are_announced(monkeypatch):
    announced, queues = [], []
    monkeypatch.setattr(publisher, "_local_receivers", [lambda names: announced.append(set(names))])
    WorkerFactory(wid="silent", beat_at=ago(seconds=61))
    JobFactory(working=True, wid="silent", reserved_until=timezone.now() + timedelta(hours=1))
    Maintenance("default", on_work=queues.append).run_once()
    assert (announced, queues) == ([{ANY_QUEUE}], [None])
