"""Plant incidents: the alarm that names the cause is first, and a healthy day has none."""

import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import connection
from django.test import override_settings
from django.utils import timezone

from django_faktory.core.histograms import Series
from django_faktory.core.payloads import failure
from django_faktory.models import Batch, Job, OutboxEntry, Queue
from django_faktory.operations import alarms
from django_faktory.store.limits import definitions
from django_faktory.store.statistics import histograms
from tests.factories import CronFactory, JobFactory, QueueFactory, WorkerFactory
from tests.store.limits.conftest import Node, limit

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]


def ago(**duration):
    return timezone.now() - timedelta(**duration)


def running_worker(wid="app-1", **fields):
    now = timezone.now()
    return WorkerFactory(wid=wid, hostname="app-1", seen_at=now, beat_at=now, **fields)


def ran(jobtype="shop.tasks.send", queue="mail", *, minutes_ago=1, succeeded=0, failed=0):
    series = Series(started=succeeded + failed, succeeded=succeeded, failed=failed)
    histograms.add({(queue, jobtype): series}, using="default", now=ago(minutes=minutes_ago))


def waiting(queue="mail", **age):
    QueueFactory(name=queue)
    return JobFactory(queue=queue, enqueued_at=ago(**age), created_at=ago(**age))


def found():
    return alarms.read(using="default")


# --- incidents; each returns the kind and the subject of the alarm that must be first


def no_worker_runs():
    waiting(minutes=5)
    return "no-workers", ""


def all_workers_are_quiet():
    running_worker(state="quiet")
    waiting(minutes=5)
    return "no-workers", ""


def no_worker_takes_a_new_queue():
    running_worker()
    ran(queue="mail", succeeded=50)
    waiting("accounts", minutes=13)
    return "unserved-queue", "accounts"


def a_queue_lost_its_worker_in_a_deploy():
    running_worker()
    ran(queue="accounts", succeeded=50, minutes_ago=9)
    ran(queue="mail", succeeded=50)
    waiting("accounts", minutes=8)
    return "unserved-queue", "accounts"


def a_queue_is_slow():
    running_worker()
    ran(succeeded=10)
    waiting("mail", minutes=15)
    return "late-queue", "mail"


def a_deploy_breaks_a_task_that_is_retried():
    running_worker()
    ran("shop.tasks.charge", failed=300, succeeded=2)
    JobFactory.create_batch(3, retries=True, jobtype="shop.tasks.charge", run_at=ago(minutes=-5))
    return "failing-task", "shop.tasks.charge"


def every_job_of_a_task_dies():
    running_worker()
    ran("shop.tasks.charge", failed=20)
    JobFactory.create_batch(3, dead=True, jobtype="shop.tasks.charge")
    return "failing-task", "shop.tasks.charge"


def a_task_fails_beside_a_busy_healthy_one():
    running_worker()
    ran("shop.tasks.send", succeeded=5000)
    ran("shop.tasks.charge", failed=6)
    return "failing-task", "shop.tasks.charge"


def a_misspelt_task_is_pushed():
    running_worker()
    node = Node()
    node.push("a", jobtype="shop.tasks.chrage")
    [job] = node.reserve()
    error = {"errtype": "UnknownJobType", "message": "no task is registered", "verdict": "later", "retry_in_s": 20.0}
    assert node.broker.fail([failure(jid=job.jid, wid=job.wid, attempt=job.attempt, **error)]) == [True]
    return "unknown-task", "shop.tasks.chrage"


def a_node_stopped_sending_heartbeats():
    running_worker()
    WorkerFactory(wid="app-2", hostname="app-2", seen_at=ago(seconds=45), beat_at=ago(seconds=45))
    return "silent-worker", "app-2"


def a_queue_was_paused_and_forgotten():
    running_worker()
    waiting("mail", hours=2)
    Queue.objects.update(paused_at=ago(hours=1))
    return "paused-queue", "mail"


def a_task_was_paused_and_forgotten():
    running_worker()
    definitions.pause(["noop"], using="default")
    Node().push("a", "b")
    assert Node().fetch(2) == []
    return "paused-task", "noop"


def a_batch_waits_for_a_dead_member():
    running_worker()
    Batch.objects.create(bid="b-import", total=5, pending=1, failed=1, committed_at=ago(hours=3))
    JobFactory(dead=True, bid="b-import", has_run=True, counts_failed=True)
    return "stuck-batch", "b-import"


def a_child_batch_waits_for_a_dead_member():
    running_worker()
    batch = {"committed_at": ago(hours=3), "total": 1}
    Batch.objects.create(bid="b-import", open_children=1, unsucceeded_children=1, children=1, **batch)
    Batch.objects.create(bid="b-part", parent_bid="b-import", depth=1, pending=1, failed=1, **batch)
    JobFactory(dead=True, bid="b-part", has_run=True, counts_failed=True)
    return "stuck-batch", "b-part"


def a_batch_waits_for_its_dead_callback():
    running_worker()
    Batch.objects.create(bid="b-report", total=5, complete_failed=True, complete_st="1", committed_at=ago(hours=3))
    return "stuck-batch", "b-report"


def the_outbox_was_refused():
    running_worker()
    OutboxEntry.objects.create(jid="refused-job", queue="mail", job="{}", error="no room")
    return "outbox-refused", ""


def a_cron_schedule_matches_no_date():
    running_worker()
    CronFactory(name="leap", schedule="0 0 30 2 *", problem="schedule: …")
    return "cron-never-runs", "leap"


def no_node_runs_cron():
    running_worker()
    CronFactory(next_at=ago(minutes=9))
    return "cron-overdue", ""


def no_node_reads_a_new_cron_row():
    running_worker()
    CronFactory(created_at=ago(minutes=9))
    return "cron-overdue", ""


def no_node_enqueues_due_jobs():
    running_worker()
    JobFactory(scheduled=True, run_at=ago(minutes=4))
    return "overdue-jobs", ""


def the_database_is_slow():
    running_worker()
    return "slow-database", ""


INCIDENTS = [
    no_worker_runs, all_workers_are_quiet, no_worker_takes_a_new_queue, a_queue_lost_its_worker_in_a_deploy,
    a_queue_is_slow, a_deploy_breaks_a_task_that_is_retried, every_job_of_a_task_dies,
    a_task_fails_beside_a_busy_healthy_one, a_misspelt_task_is_pushed, a_node_stopped_sending_heartbeats,
    a_queue_was_paused_and_forgotten, a_task_was_paused_and_forgotten, a_batch_waits_for_a_dead_member,
    a_child_batch_waits_for_a_dead_member, a_batch_waits_for_its_dead_callback, the_outbox_was_refused,
    a_cron_schedule_matches_no_date, no_node_runs_cron, no_node_reads_a_new_cron_row,
    no_node_enqueues_due_jobs, the_database_is_slow,
]  # fmt: skip


@contextmanager
def slow_statements(is_slow):
    def delay(execute, sql, params, many, context):
        if sql == "SELECT 1":
            time.sleep(alarms.SLOW_S)
        return execute(sql, params, many, context)

    if is_slow:
        with connection.execute_wrapper(delay):
            yield
    else:
        yield


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.__name__)
def test_an_incident_has_one_alarm_which_names_its_cause(incident):
    kind, subject = incident()
    with slow_statements(incident is the_database_is_slow):
        [first] = found()
    assert (first.kind, first.subject) == (kind, subject)
    assert first.affected > 0
    assert first.since is None or first.since <= timezone.now()
    assert not first.text.endswith(".")
    assert first.advice.endswith(".")


def test_a_healthy_day_has_no_alarm():
    running_worker()
    running_worker("app-2")
    running_worker("app-3", state="quiet")  # during a deploy
    for minutes in range(9):
        ran("shop.tasks.send", succeeded=400, failed=9, minutes_ago=minutes)
        ran("shop.tasks.webhook", succeeded=40, failed=15, minutes_ago=minutes)
    ran("shop.tasks.once", failed=2)
    for queue in ("mail", "default"):
        waiting(queue, seconds=20)
    ran(queue="default", succeeded=10)
    QueueFactory(name="holidays", paused_at=ago(days=3))
    JobFactory(working=True, wid="app-1", queue="reports", started_at=ago(hours=1))
    waiting("reports", minutes=9)  # behind a long job
    JobFactory.create_batch(3, dead=True, errtype="Timeout", finished_at=ago(hours=5))
    JobFactory(scheduled=True, run_at=ago(hours=-1))
    JobFactory(retries=True, run_at=ago(minutes=-3))
    JobFactory(scheduled=True, run_at=ago(seconds=2))
    limit("task", "slow", 1)
    node = Node()
    node.push("a", "b", "c", queue="limited", jobtype="slow")
    assert len(node.fetch(2, queues=("limited",), wid="app-1")) == 1, "the others wait for the limit, as they should"
    Batch.objects.create(bid="b-runs", total=5, pending=2, failed=1, committed_at=ago(minutes=3))
    JobFactory(retries=True, bid="b-runs", has_run=True, counts_failed=True, run_at=ago(minutes=-3))
    CronFactory(next_at=ago(hours=-3))
    CronFactory(paused_at=ago(days=1))
    assert found() == []


@pytest.mark.django_db(databases=["default", "other"])
@override_settings(FAKTORY={"DATABASE": "other"})
def test_refused_jobs_in_the_outbox_of_another_database_are_an_alarm():
    OutboxEntry.objects.using("default").create(jid="refused-job", queue="mail", job="{}", error="no room")
    assert [(alarm.kind, alarm.affected) for alarm in alarms.read(using="other")] == [("outbox-refused", 1)]


def test_a_queue_behind_long_jobs_of_another_queue_is_late_and_not_unserved():
    running_worker()
    JobFactory(working=True, wid="app-1", queue="reports", started_at=ago(hours=1))
    waiting("mail", minutes=5)
    assert found() == []
    waiting("accounts", minutes=15)
    assert [(alarm.kind, alarm.subject) for alarm in found()] == [("late-queue", "accounts")]


def test_an_idle_project_without_workers_has_no_alarm():
    assert found() == []


def test_a_job_pushed_a_moment_ago_to_a_new_queue_causes_no_alarm():
    running_worker()
    waiting("new", seconds=5)
    assert found() == []


def test_the_alarm_about_latency_follows_its_setting():
    a_queue_is_slow()
    with override_settings(FAKTORY={"ALARM_LATENCY": 3600}):
        assert alarms.read_now(using="default") == []
    with override_settings(FAKTORY={"ALARM_LATENCY": 0}):
        assert alarms.read_now(using="default") == []


def test_critical_alarms_come_first():
    a_queue_was_paused_and_forgotten()
    waiting("accounts", minutes=13)
    assert [alarm.is_critical for alarm in found()] == [True, False]


def test_a_job_that_a_worker_did_not_know_keeps_no_error_after_it_ran():
    a_misspelt_task_is_pushed()
    Job.objects.update(run_at=None, state="enqueued", enqueued_at=ago(seconds=1))
    assert found() == []


def test_the_number_of_statements_does_not_depend_on_the_number_of_rows(django_assert_max_num_queries):
    for number in range(30):
        waiting(f"queue-{number}", minutes=5)
    definitions.pause([f"task-{number}" for number in range(30)], using="default")
    running_worker()
    with django_assert_max_num_queries(25):
        assert len(alarms.read_now(using="default")) == alarms.MAX_PER_KIND


NAMED = (a_node_stopped_sending_heartbeats, every_job_of_a_task_dies, a_misspelt_task_is_pushed,
         a_task_was_paused_and_forgotten, a_batch_waits_for_a_dead_member, a_cron_schedule_matches_no_date)  # fmt: skip


@pytest.mark.parametrize("incident", NAMED, ids=lambda incident: incident.__name__)
def test_an_alarm_names_nothing_that_the_user_may_not_see(incident):
    _, subject = incident()
    [named] = alarms.hide_names(found(), lambda _: True)
    assert subject in named.text or named.subject == subject
    [nameless] = alarms.hide_names(found(), lambda _: False)
    assert (nameless.subject, nameless.kind) == ("", named.kind)
    assert subject not in nameless.text + nameless.advice


@pytest.mark.parametrize(
    ("runs", "minutes"),
    [
        ({3: (0, 9), 2: (0, 9), 1: (0, 9)}, 3),
        ({9: (50, 1), 2: (0, 30), 1: (0, 30)}, 2),  # one failure among successes is no beginning
        ({70: (0, 9), 40: (0, 9), 2: (0, 9)}, 70),  # it began before the window
        ({70: (0, 9), 60: (9, 0), 2: (0, 9)}, 2),  # an earlier incident has ended
        ({5: (1, 20), 4: (0, 9), 1: (1, 0)}, 5),  # a success since is not yet a repair
        ({25 * 60: (0, 9), 23 * 60: (0, 9), 1: (0, 9)}, 23 * 60),  # no more than a day is read
    ],
)
def test_a_task_fails_since_the_first_failure_of_the_present_streak(runs, minutes):
    running_worker()
    for minutes_ago, (succeeded, failed) in runs.items():
        ran("shop.tasks.charge", minutes_ago=minutes_ago, succeeded=succeeded, failed=failed)
        ran("shop.tasks.charge", "other", minutes_ago=minutes_ago, succeeded=succeeded, failed=failed)
        ran("shop.tasks.send", minutes_ago=minutes_ago, succeeded=500)
    [alarm] = found()
    assert alarm.kind == "failing-task"
    assert timedelta(0) <= ago(minutes=minutes) - alarm.since < timedelta(minutes=1, seconds=30)
