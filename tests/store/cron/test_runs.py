"""Ticks of cron entries: each is taken at most once, in one transaction with its job, and its outcome is recorded."""

import sqlite3
import threading
from datetime import UTC, datetime, timedelta

import pytest
from django.db import IntegrityError, OperationalError, connection, connections, transaction
from django.db.models import signals
from django.utils import timezone

from django_faktory.core.lifecycle import ENDED
from django_faktory.errors import BrokerUnavailable, FaktoryError, NotUnique
from django_faktory.models import CronEntry, CronRun, Job
from django_faktory.store.cron import entries
from django_faktory.store.cron import runs as cron_runs
from django_faktory.store.cron.runs import CronJob
from django_faktory.store.jobs import pushes
from django_faktory.store.maintenance.pending_work import find_pending_work
from django_faktory.store.store import Store
from tests.factories import end_all, payload

pytestmark = pytest.mark.django_db(transaction=True)

USING = "default"
NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


def entry(name="hourly", schedule="0 * * * *", *, since=NOON - timedelta(minutes=1), **fields):
    made = CronEntry(name=name, schedule=schedule, zone="UTC", jobtype="noop", **fields)
    entries.save(made, using=USING, now=since)
    return made


def enqueue(one):
    job = payload(jobtype=one.jobtype, queue=one.queue or "default")
    pushes.push(Store(USING), [job])
    return CronJob(job.jid, job.queue)


def take(now, by=enqueue):
    return cron_runs.enqueue_due_runs(by, using=USING, now=now)


def history(one=None):
    """Return (hour:minute, outcome) of each run, in the order they were taken."""
    runs = CronRun.objects.order_by("pk")
    runs = runs.filter(entry=one) if one else runs
    return [(f"{run.tick:%H:%M}" if run.tick else "manually", run.outcome) for run in runs]


def test_a_tick_enqueues_one_job_and_schedules_the_next_tick():
    one = entry(queue="mail")
    assert take(NOON - timedelta(seconds=1)) == set()
    assert take(NOON) == {"mail"}
    assert take(NOON) == set()
    one.refresh_from_db()
    run = CronRun.objects.get()
    assert (one.next_at, run.tick, run.outcome) == (NOON + timedelta(hours=1), NOON, "enqueued")
    assert Job.objects.get().jid == run.jid


def test_the_time_to_the_next_tick_is_read_in_one_statement(django_assert_num_queries):
    assert find_pending_work(using=USING, now=NOON).tick_in_s is None
    entry(since=NOON)
    entry("daily", "0 0 * * *", since=NOON)
    with django_assert_num_queries(1):
        found = find_pending_work(using=USING, now=NOON, worker_timeout_s=60)
    assert (found.tick_in_s, found.due_in_s) == (3600, None)


def test_two_nodes_enqueue_one_job_for_the_same_tick():
    """Both nodes see that it is due before either takes it."""
    entry()
    both_saw, woken = threading.Barrier(2), []

    def node():
        one = CronEntry.objects.get(next_at__lte=NOON)
        both_saw.wait(60)
        for _ in range(5):
            woken.append(cron_runs.run(USING, lambda here: cron_runs._take_runs(here, one.pk, enqueue, NOON)))
        connections.close_all()

    nodes = [threading.Thread(target=node) for _ in range(2)]
    for one in nodes:
        one.start()
    for one in nodes:
        one.join(30)
    assert sorted(map(len, woken)) == [0] * 9 + [1]
    assert Job.objects.count() == CronRun.objects.count() == 1


def test_a_node_skips_an_entry_locked_by_another_node():
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("one writer at a time: the second waits for the first")
    entry()
    entry("free")
    woken = []

    def node():
        woken.append(take(NOON))
        connections.close_all()

    with transaction.atomic():
        assert cron_runs._take_runs(connection, CronEntry.objects.get(name="hourly").pk, enqueue, NOON)
        second = threading.Thread(target=node)
        second.start()
        second.join(30)
    assert woken == [{"default"}]
    assert {run.entry.name for run in CronRun.objects.all()} == {"free", "hourly"}
    assert Job.objects.count() == 2


def test_the_database_refuses_a_second_run_of_a_tick():
    one = entry()
    CronRun.objects.create(entry=one, tick=NOON, outcome="enqueued")
    with pytest.raises(IntegrityError), transaction.atomic():
        CronRun.objects.create(entry=one, tick=NOON, outcome="enqueued")


def test_a_tick_is_not_repeated_when_the_clock_is_set_back():
    one = entry()
    take(NOON)
    CronEntry.objects.update(next_at=NOON)
    assert take(NOON) == set()
    one.refresh_from_db()
    assert (one.next_at, Job.objects.count()) == (NOON + timedelta(hours=1), 1)


@pytest.mark.parametrize("trouble", [OperationalError("gone"), BrokerUnavailable("gone")])
def test_a_tick_is_retried_after_its_transaction_failed(trouble):
    entry()

    def breaks(one):
        enqueue(one)
        raise trouble

    with pytest.raises(BrokerUnavailable):
        take(NOON, breaks)
    assert (Job.objects.count(), CronRun.objects.count()) == (0, 0)
    assert take(NOON) == {"default"}


def test_a_refused_job_is_recorded_and_does_not_stop_other_entries(caplog):
    first, second = entry("first"), entry("second", queue="mail")

    def refuses(one):
        made = enqueue(one)
        if one.name == "first":
            raise NotUnique(made.jid)
        return made

    assert take(NOON, refuses) == {"mail"}
    assert (history(first), history(second)) == ([("12:00", "refused")], [("12:00", "enqueued")])
    assert CronRun.objects.get(entry=first).note == "NotUnique: Job not unique"
    assert Job.objects.count() == 1
    assert "could not be enqueued name=first" in caplog.text


# --- policies


@pytest.mark.parametrize(
    ("missed", "runs"),
    [
        ("skip", [("12:00", "missed")]),
        ("once", [("12:00", "missed"), ("15:00", "enqueued")]),
        ("all", [(f"{hour}:00", "enqueued") for hour in (12, 13, 14, 15)]),
    ],
)
def test_ticks_missed_without_a_node_follow_the_policy_of_the_entry(missed, runs):
    one = entry(missed=missed)
    take(NOON + timedelta(hours=3, minutes=20))
    assert history() == runs
    assert Job.objects.count() == len([run for run in runs if run[1] == "enqueued"])
    one.refresh_from_db()
    assert one.next_at == NOON + timedelta(hours=4)


def test_many_missed_ticks_are_enqueued_in_portions_of_100():
    entry(schedule="* * * * *", missed="all")
    now = NOON + timedelta(minutes=249)
    counts = []
    while take(now):
        counts.append(Job.objects.count())
    assert counts == [100, 200, 250]


def test_only_missed_ticks_within_the_window_are_enqueued():
    entry(missed="all", window_s=5400)
    take(NOON + timedelta(hours=3, minutes=20))
    assert history() == [("12:00", "missed"), ("14:00", "enqueued"), ("15:00", "enqueued")]


def end(state, **fields):
    values = {"state": state, "run_at": None, "finished_at": NOON, "purge_at": NOON + timedelta(days=1)} | fields
    if state in ENDED:
        end_all(**values)
    else:
        Job.live.update(**values)


def test_a_tick_is_skipped_while_an_earlier_job_waits_or_runs():
    entry(overlap="skip")
    for hour in range(4):
        take(NOON + timedelta(hours=hour))
        if hour == 1:
            end("working", reserved_until=NOON, attempt=1)
        if hour == 2:
            end("succeeded")
    assert [outcome for _, outcome in history()] == ["enqueued", "overlapped", "overlapped", "enqueued"]


def test_a_dead_job_blocks_no_tick_until_it_is_retried():
    entry(overlap="skip")
    take(NOON)
    end("dead")
    cron_runs.record_run_outcomes(using=USING)
    take(NOON + timedelta(hours=1))
    end("dead")
    cron_runs.record_run_outcomes(using=USING)
    Job.objects.filter(jid=CronRun.objects.earliest("pk").jid).update(
        state="enqueued", enqueued_at=NOON, finished_at=None, purge_at=None
    )
    take(NOON + timedelta(hours=2))
    assert [outcome for _, outcome in history()] == ["dead", "dead", "overlapped"]


def test_only_one_of_several_missed_ticks_runs_without_overlap():
    entry(overlap="skip", missed="all")
    take(NOON + timedelta(hours=2))
    assert [outcome for _, outcome in history()] == ["enqueued", "overlapped", "overlapped"]


# --- manual operations


def test_a_paused_entry_has_no_ticks_and_catches_up_on_none():
    one = entry(missed="all")
    assert entries.pause([one.pk], using=USING) == 1
    assert entries.pause([one.pk], using=USING) == 0
    assert take(NOON + timedelta(hours=5)) == set()
    assert entries.resume([one.pk], using=USING, now=NOON + timedelta(hours=5)) == 1
    assert entries.resume([one.pk], using=USING) == 0
    take(NOON + timedelta(hours=6))
    assert history() == [("18:00", "enqueued")]


def test_the_database_refuses_a_paused_entry_that_is_due():
    one = entry()
    with pytest.raises(IntegrityError), transaction.atomic():
        CronEntry.objects.filter(pk=one.pk).update(paused_at=NOON)


def test_run_now_enqueues_a_job_of_a_paused_or_busy_entry():
    one = entry(overlap="skip", queue="mail")
    take(NOON)
    entries.pause([one.pk], using=USING)
    made = cron_runs.run_now(one.pk, enqueue, using=USING)
    assert made.queue == "mail"
    assert history() == [("12:00", "enqueued"), ("manually", "enqueued")]
    assert Job.objects.filter(jid=made.jid).exists()
    cron_runs.run_now(one.pk, enqueue, using=USING)
    assert Job.objects.count() == 3


def test_run_now_reports_why_it_failed():
    one = entry()

    def refuses(_):
        raise ValueError("no such thing")

    with pytest.raises(FaktoryError, match="ValueError: no such thing"):
        cron_runs.run_now(one.pk, refuses, using=USING)
    assert history() == [("manually", "refused")]


def test_a_changed_schedule_applies_from_the_time_of_the_edit():
    one = entry(missed="all")
    one.schedule = "30 * * * *"
    entries.save(one, using=USING, now=NOON + timedelta(hours=2))
    take(NOON + timedelta(hours=2, minutes=30))
    assert history() == [("14:30", "enqueued")]


def test_an_edit_of_another_field_neither_loses_nor_repeats_a_tick():
    one = entry()
    take(NOON)
    one.queue = "mail"  # as read before the tick
    one.next_at = NOON
    entries.save(one, using=USING, now=NOON + timedelta(minutes=30))
    assert take(NOON + timedelta(minutes=30)) == set()
    assert take(NOON + timedelta(hours=1)) == {"mail"}
    assert [tick for tick, _ in history()] == ["12:00", "13:00"]


def test_an_invalid_entry_records_its_problem_and_is_no_longer_due(caplog):
    one = entry()
    CronEntry.objects.filter(pk=one.pk).update(zone="Mars/Olympus")
    assert take(NOON) == set()
    one.refresh_from_db()
    assert one.next_at is None
    assert one.problem.startswith("zone: expected the name of a time zone")
    assert "disabled, its schedule is invalid name=hourly" in caplog.text
    one.zone = "UTC"
    entries.save(one, using=USING, now=NOON)
    one.refresh_from_db()
    assert (one.next_at, one.problem) == (NOON + timedelta(hours=1), "")


# --- rows that other code wrote


def adopt(now=NOON):
    entries.adopt(default_zone="Europe/Berlin", using=USING, now=now)


@pytest.mark.parametrize("zone", ["UTC", ""])
def test_an_entry_written_without_its_next_tick_runs(zone):
    CronEntry.objects.bulk_create([CronEntry(name="ring", schedule="30 12 * * *", zone=zone, jobtype="noop")])
    adopt()
    half_past = NOON + timedelta(minutes=30)
    expected = half_past if zone else half_past + timedelta(hours=22)  # half past 12 in Berlin is over
    one = CronEntry.objects.get()
    assert (one.next_at, one.zone) == (expected, zone or "Europe/Berlin")
    take(expected)
    assert [outcome for _, outcome in history()] == ["enqueued"]


@pytest.mark.parametrize(("schedule", "next_at"), [("*/5 * * * *", NOON + timedelta(minutes=5)), ("61 * * * *", None)])
def test_a_schedule_changed_in_the_row_applies_before_the_next_tick_of_the_old_one(schedule, next_at, caplog):
    entry(schedule="0 0 1 1 *")
    CronEntry.objects.update(schedule=schedule)
    adopt()
    one = CronEntry.objects.get()
    assert (one.next_at, bool(one.problem)) == (next_at, next_at is None)
    assert caplog.text.count("cron entry disabled, its schedule is invalid name=hourly") == (next_at is None)


@pytest.mark.parametrize("field", [{"schedule": "every day"}, {"schedule": "0 0 30 2 *"}, {"zone": "Mars/Olympus"}])
def test_a_row_that_can_never_run_is_reported_once_and_stops_no_other(field, caplog):
    made = {"schedule": "0 * * * *", "zone": "UTC", "jobtype": "noop"}
    CronEntry.objects.create(**{**made, **field}, name="bad")
    CronEntry.objects.create(**made, name="good")
    for _ in range(3):
        adopt()
    bad, good = CronEntry.objects.order_by("name")
    assert (bad.next_at, good.next_at) == (None, NOON + timedelta(hours=1))
    assert bad.problem.startswith(f"{min(field)}: ")
    assert caplog.text.count("cron entry disabled, its schedule is invalid name=bad") == 1
    CronEntry.objects.filter(name="bad").update(**{name: made[name] for name in field})
    adopt()
    assert list(CronEntry.objects.values_list("next_at", "problem")) == [(NOON + timedelta(hours=1), "")] * 2


def test_an_entry_that_is_paused_removed_or_waits_for_its_tick_is_not_rescheduled(django_assert_max_num_queries):
    entry("paused", paused_at=NOON)
    entry("removed", removed_at=NOON)
    entry("waits", schedule="0 18 * * *")
    before = list(CronEntry.objects.order_by("pk").values())
    with django_assert_max_num_queries(1):
        adopt()
    assert list(CronEntry.objects.order_by("pk").values()) == before


# --- history


@pytest.mark.parametrize("state", ["succeeded", "dead", "discarded", "expired"])
def test_the_outcome_of_the_job_is_recorded(state):
    entry()
    take(NOON)
    cron_runs.record_run_outcomes(using=USING)
    assert history() == [("12:00", "enqueued")]
    end(state)
    cron_runs.record_run_outcomes(using=USING, now=NOON)
    assert history() == [("12:00", state)]
    Job.objects.all().delete()
    cron_runs.record_run_outcomes(using=USING)
    run = CronRun.objects.get()
    assert (run.outcome, run.ended_at) == (state, NOON)


def test_the_outcome_of_a_retried_dead_job_is_updated():
    entry()
    take(NOON)
    for state in ("dead", "enqueued", "succeeded"):
        end(state, enqueued_at=NOON)
        cron_runs.record_run_outcomes(using=USING)
        assert history() == [("12:00", state)]


def test_a_job_deleted_before_its_outcome_is_recorded_counts_as_gone():
    entry()
    take(NOON)
    Job.objects.all().delete()
    cron_runs.record_run_outcomes(using=USING)
    assert history() == [("12:00", "gone")]


def test_a_cron_job_is_kept_long_enough_to_record_its_outcome():
    entry()
    take(NOON)
    assert Job.objects.get().result_ttl == cron_runs.KEPT_FOR_S


def test_the_latest_and_the_unfinished_runs_are_kept():
    one, other = entry(), entry("other")
    for hour in range(8):
        outcome = "enqueued" if hour == 2 else "succeeded"
        CronRun.objects.create(entry=one, tick=NOON + timedelta(hours=hour), outcome=outcome)
    CronRun.objects.create(entry=other, tick=NOON, outcome="succeeded")
    while cron_runs.forget_old(using=USING, kept_runs=3):
        pass
    assert [tick for tick, _ in history(one)] == ["14:00", "17:00", "18:00", "19:00"]
    assert len(history(other)) == 1


# --- entries defined in code


def definition(name="nightly", schedule="30 2 * * *", **fields):
    return entries.CronDefinition(name=name, schedule=schedule, zone="UTC", jobtype="noop", **fields)


def sync(*definitions, now=NOON):
    entries.sync(definitions, using=USING, now=now)


def test_entries_defined_in_code_keep_their_history_when_removed_and_restored():
    sync(definition())
    take(NOON + timedelta(hours=14, minutes=30))
    sync(definition(schedule="0 4 * * *"), now=NOON + timedelta(hours=15))
    one = CronEntry.objects.get()
    assert (one.origin, one.next_at) == ("code", NOON + timedelta(hours=16))
    sync(now=NOON + timedelta(hours=15))
    one.refresh_from_db()
    assert (one.next_at, one.removed_at) == (None, NOON + timedelta(hours=15))
    sync(definition(schedule="0 4 * * *"), now=NOON + timedelta(hours=17))
    one.refresh_from_db()
    assert (one.next_at, one.removed_at) == (NOON + timedelta(hours=40), None)
    assert len(history(one)) == 1


def test_a_repeated_sync_of_the_same_entries_changes_nothing():
    sync(definition())
    before = CronEntry.objects.values().get()
    sync(definition(), now=NOON + timedelta(days=3))
    assert CronEntry.objects.values().get() == before


def test_a_paused_entry_stays_paused_after_a_deployment():
    sync(definition())
    one = CronEntry.objects.get()
    entries.pause([one.pk], using=USING)
    sync(definition(schedule="0 5 * * *"))
    one.refresh_from_db()
    assert (one.schedule, one.next_at) == ("0 5 * * *", None)
    assert one.paused_at is not None


def test_sync_does_not_change_an_admin_entry_with_the_same_name(caplog):
    mine = entry("nightly", "0 1 * * *")
    sync(definition())
    mine.refresh_from_db()
    assert (mine.origin, mine.schedule, mine.removed_at) == ("admin", "0 1 * * *", None)
    assert "a name taken in the admin" in caplog.text


def test_nodes_that_start_together_create_each_entry_once():
    wanted = [definition(f"entry {number}") for number in range(20)]
    barrier, errors = threading.Barrier(4), []

    def node():
        barrier.wait(60)
        try:
            entries.sync(wanted, using=USING)
        except Exception as error:  # noqa: BLE001 (handed to the test)
            errors.append(error)
        connections.close_all()

    nodes = [threading.Thread(target=node) for _ in range(4)]
    for one in nodes:
        one.start()
    for one in nodes:
        one.join(30)
    assert errors == []
    assert CronEntry.objects.filter(next_at__gt=timezone.now()).count() == 20


def test_an_entry_whose_first_insert_was_rolled_back_is_stored_by_the_second():
    attempts, busy = [], sqlite3.OperationalError("database is locked")
    busy.sqlite_errorname = "SQLITE_BUSY"

    def collide(**_):
        attempts.append(1)
        if len(attempts) == 1:
            raise OperationalError("database is locked") from busy

    signals.post_save.connect(collide, sender=CronEntry)
    try:
        entries.save(CronEntry(name="new", schedule="* * * * *", zone="UTC", jobtype="x"), using="default")
    finally:
        signals.post_save.disconnect(collide, sender=CronEntry)
    assert CronEntry.objects.filter(name="new").count() == 1
