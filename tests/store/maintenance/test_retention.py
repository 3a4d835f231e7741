"""The history leaves by days (ADR 0049), whatever happens to its partitions, the clock, the disk and the rights."""

import os
import subprocess
import threading
from contextlib import contextmanager, suppress
from datetime import UTC, date, timedelta
from functools import partial
from itertools import pairwise

import pytest
from django.db import connection, connections
from django.utils import timezone

from django_faktory.core.lifecycle import KEPT
from django_faktory.core.payloads import Ack, FetchRequest
from django_faktory.models import History, Job
from django_faktory.operations import alarms
from django_faktory.store.dialects import dialect_of
from django_faktory.store.dialects.partitions import DAY, Partition
from django_faktory.store.jobs import acknowledgements, claims, pushes
from django_faktory.store.maintenance import due
from django_faktory.store.maintenance.retention import MAX_PARTITIONS, Retention, missing
from django_faktory.store.statistics import deltas
from django_faktory.store.store import Store
from tests.factories import JobFactory, payload

HISTORY = "django_faktory_history"
IS_POSTGRESQL = connection.vendor == "postgresql"
partitioned = pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no partitions")
on_postgresql = pytest.mark.skipif(not IS_POSTGRESQL, reason="MariaDB detaches nothing, and has a file for each table")

pytestmark = pytest.mark.django_db(transaction=True)

# --- which days there should be


def day_partitions(*firsts, width=1):
    kept = Partition("kept", date.min, KEPT + DAY)
    return [kept, *(Partition(str(first), first, first + width * DAY) for first in firsts)]


TODAY = date(2026, 11, 30)


def test_partitions_are_made_for_today_and_two_weeks():
    made = list(missing(day_partitions(), TODAY))
    assert made == [(TODAY + n * DAY, TODAY + (n + 1) * DAY) for n in range(15)]
    assert list(missing(day_partitions(*(first for first, _ in made)), TODAY)) == []
    assert next(missing([], TODAY)) == (KEPT, KEPT + DAY)


@pytest.mark.parametrize(("days", "width"), [(0, 1), (1, 1), (40, 1), (90, 3), (400, 10), (1300, 31), (3650, None)])
@pytest.mark.parametrize("is_known", [True, False])
def test_there_are_never_more_than_60_partitions(days, width, is_known):
    """For six years of any RESULT_TTL, and if each task has a `result_ttl` that is not that of the setting."""
    found = day_partitions(TODAY)
    for today in (TODAY + n * DAY for n in range(2200)):
        made = missing(found, today, days * 86_400 if is_known else 0)
        found += [Partition(str(first), first, end) for first, end in made]
        found = [one for one in found if one.is_kept or one.end + days * DAY >= today]
        assert len(found) <= MAX_PARTITIONS
        if is_known and width:
            assert any(one.first <= today < one.end for one in found)
    if is_known and width:
        assert {one.end - one.first for one in found if not one.is_kept} == {width * DAY}


def test_a_partition_made_by_hand_is_counted_and_the_days_around_it_are_made():
    found = [*day_partitions(), Partition("theirs", TODAY + 3 * DAY, TODAY + 9 * DAY)]
    made = list(missing(found, TODAY))
    assert made[2:4] == [(TODAY + 2 * DAY, TODAY + 3 * DAY), (TODAY + 9 * DAY, TODAY + 10 * DAY)]
    for (_, end), (first, _) in pairwise(made):
        assert first == end or (end, first) == (TODAY + 3 * DAY, TODAY + 9 * DAY)


# --- on the database


def partitions(alias="default"):
    return dialect_of(connections[alias]).partitions.read(connections[alias])


def execute(sql, *values, on=connection):
    with on.cursor() as cursor:
        cursor.execute(sql, values)
        return cursor.fetchall() if cursor.description else None


def today():
    return timezone.now().astimezone(UTC).date()


@pytest.fixture
def days():
    """Return a function that adds partitions of past days; at the end, those of a new database are left."""
    yield lambda *ages: [add(day) for day in partitioned_from(today() - max(ages) * DAY, ages)]
    assert deltas.recount(using="default") == {}
    if IS_POSTGRESQL:
        for (name,) in execute(f"SELECT oid::regclass FROM pg_class WHERE relkind = 'r' AND relname ~ '^{HISTORY}_'"):
            execute(f"DROP TABLE {name}")
        add(KEPT)
    else:
        execute(f"TRUNCATE {HISTORY}")
        execute(f"ALTER TABLE {HISTORY} REMOVE PARTITIONING")
        dialect_of(connection).partitions.convert(connection)
    if IS_POSTGRESQL:
        add(today())


def partitioned_from(first, ages):
    """Return the days of these ages. On MariaDB, which adds partitions at the end only, partition the table again."""
    if not IS_POSTGRESQL:
        ends = [first + n * DAY for n in range(max(ages) + 2)]
        ranges = ", ".join(f"PARTITION d{end - DAY:%Y%m%d} VALUES LESS THAN ('{end}')" for end in ends)
        execute(f"ALTER TABLE {HISTORY} PARTITION BY RANGE COLUMNS (day) ({ranges})")
    return [today() - age * DAY for age in ages]


def add(first, width=1):
    dialect_of(connection).partitions.add(connection, first, first + width * DAY)
    return first


def ended(count=1, *, day, due_in):
    """Insert rows of this day; the last one is due in `due_in`, each of the others a second earlier."""
    pks = [job.pk for job in Job.objects.bulk_create(JobFactory.many(count, succeeded=True))]
    for place, pk in enumerate(reversed(pks)):
        purge_at = timezone.now() + due_in - timedelta(seconds=place)
        History.objects.filter(pk=pk).update(day=day, purge_at=purge_at)
    return pks


def end_one(store=None, alias="default", **fields):
    """Push, claim and end a job; return its row."""
    store = store or Store(alias)
    job = payload(result_ttl=600, **fields)
    assert pushes.push(store, [job]) == [None]
    [[held]] = claims.fetch(store, [FetchRequest(queues=("default",), wid="w1")])
    assert acknowledgements.ack(store, [Ack(jid=held.jid, wid="w1", attempt=held.attempt)]) == [True]
    return History.objects.using(alias).get(jid=job.jid)


def round_of(**options):
    Retention(Store("default", **options)).run()


def firsts():
    """Return the first days of the partitions. On MariaDB, one begins where the one before it ended or was removed."""
    return [one.end - DAY for one in partitions() if not one.is_kept]


@contextmanager
def reader():
    """Keep a transaction of another session open that has read the history, as a dump does."""
    other = connection.copy()
    other.set_autocommit(False)
    execute(f"SELECT COUNT(*) FROM {HISTORY}", on=other)
    try:
        yield other
    finally:
        other.rollback()
        other.close()


@partitioned
def test_the_history_of_a_new_database_has_the_day_of_its_migration():
    kept, first, *_ = partitions()
    assert kept.is_kept
    assert kept.end <= first.first <= today() < first.end + DAY


@partitioned
def test_days_are_added_ahead_once(days):
    round_of()
    assert firsts()[-15:] == [today() + n * DAY for n in range(15)]
    before = partitions()
    round_of()
    assert partitions() == before
    assert end_one().day == today()


@partitioned
def test_a_day_leaves_at_once_when_its_last_row_is_due(days):
    third, second, first = days(3, 2, 1)
    ended(3, day=third, due_in=-timedelta(seconds=1))
    stays = ended(2, day=second, due_in=timedelta(minutes=1))
    ended(1, day=first, due_in=timedelta(hours=1))
    round_of()
    assert third not in firsts()
    assert {second, first} <= set(firsts())
    assert History.objects.count() == 3
    execute(f"DELETE FROM {HISTORY} WHERE id = %s", stays[0])  # a user
    History.objects.filter(pk=stays[1]).delete()
    round_of()
    assert second not in firsts(), "an empty day is removed"


@partitioned
def test_a_day_stays_if_a_row_that_is_not_due_has_come_since_the_look(days):
    [old] = days(2)
    ended(1, day=old, due_in=-timedelta(seconds=1))
    stays = ended(1, day=old, due_in=timedelta(hours=1))
    [partition] = [one for one in partitions() if one.first <= old < one.end]
    forget = partial(deltas.forget_days, connection, partition.first, partition.end)
    assert dialect_of(connection).partitions.empty(connection, partition, forget) is False
    assert set(stays) < set(History.objects.values_list("pk", flat=True))
    History.objects.filter(pk__in=stays).update(purge_at=timezone.now())
    assert dialect_of(connection).partitions.empty(connection, partition, forget) is True
    assert not History.objects.exists()
    end_one()


@partitioned
def test_rows_that_stay_for_years_do_not_keep_their_day(days):
    [old] = days(3)
    [pk] = ended(1, day=old, due_in=timedelta(days=3650))
    ended(30, day=old, due_in=-timedelta(days=2))
    round_of()
    assert old not in firsts()
    assert History.objects.get().pk == pk
    assert History.objects.get().day == KEPT
    assert due.purge(Store()) == 0
    assert due.purge(Store(now=timezone.now() + timedelta(days=3651))) == 1


@partitioned
def test_a_day_of_which_most_rows_stay_keeps_them_and_loses_the_others(days):
    [old] = days(5)
    stays = ended(3, day=old, due_in=timedelta(days=30))
    ended(5, day=old, due_in=-timedelta(days=2))
    round_of()
    assert set(History.objects.values_list("pk", flat=True)) == set(stays)
    assert old in firsts()
    assert set(History.objects.values_list("day", flat=True)) == {old}


@partitioned
def test_beside_a_reader_days_are_added_and_ends_do_not_wait(days):
    [old] = days(2)
    ended(3, day=old, due_in=-timedelta(seconds=1))
    keeper = Retention(Store())
    with reader():
        keeper.run()
        assert (today() + DAY in firsts()) is IS_POSTGRESQL
        assert History.objects.count() == 3
        execute("SET lock_timeout = 100" if IS_POSTGRESQL else "SET lock_wait_timeout = 1")
        end_one()
        execute("RESET lock_timeout" if IS_POSTGRESQL else "SET lock_wait_timeout = DEFAULT")
    keeper.run()
    assert old not in firsts()
    assert today() + DAY in firsts()
    assert History.objects.count() == 1


@on_postgresql
def test_an_empty_day_is_removed_when_the_readers_of_the_table_are_gone(days):
    [old] = days(2)
    ended(3, day=old, due_in=-timedelta(seconds=1))
    with reader() as other:
        # It has read the table, but not this day: TRUNCATE needs that lock alone.
        other.rollback()
        execute("SELECT pg_sleep(1.1)", on=other)
        execute(f"SELECT COUNT(*) FROM {HISTORY} WHERE day = %s", today(), on=other)
        execute("SELECT pg_sleep(1.1)", on=connection)
        round_of()
        assert old in firsts()
        assert History.objects.count() == 0
    round_of()
    assert old not in firsts()


# --- bad input


@on_postgresql
def test_jobs_end_with_an_earlier_day_while_that_of_today_is_detached(days, caplog):
    [yesterday] = days(1)
    ended(1, day=today(), due_in=timedelta(hours=1))
    execute(f"ALTER TABLE {HISTORY} DETACH PARTITION {HISTORY}_{today():%Y%m%d}")
    assert end_one().day == yesterday
    round_of()
    [message] = [one.getMessage() for one in caplog.records if "has jobs" in one.getMessage()]
    assert f"table={HISTORY}_{today():%Y%m%d}" in message
    assert "attach it again or drop it" in message
    assert end_one().day == yesterday
    execute(f"DROP TABLE {HISTORY}_{today():%Y%m%d}")
    assert deltas.recount(using="default") == {("succeeded", today().isoformat()): -1}
    round_of()
    assert end_one().day == today()


@on_postgresql
def test_without_any_day_jobs_end_with_those_that_leave_one_by_one(days):
    for one in partitions():
        if not one.is_kept:
            execute(f"DROP TABLE {one.name}")
    assert end_one().day == KEPT
    execute(f"DROP TABLE {HISTORY}_kept")
    deltas.recount(using="default")
    round_of()
    assert partitions()[0].is_kept
    assert end_one().day == today()


@on_postgresql
@pytest.mark.parametrize("age", [0, 2])
def test_a_detachment_that_was_interrupted_is_finished_by_the_next_round(days, age):
    days(*range(1, age + 2))
    name = f"{HISTORY}_{today() - age * DAY:%Y%m%d}"
    with reader():
        execute("SET lock_timeout = 50")
        with suppress(Exception):
            execute(f"ALTER TABLE {HISTORY} DETACH PARTITION {name} CONCURRENTLY")
        execute("RESET lock_timeout")
        assert [one.name for one in partitions() if one.is_detaching] == [name]
        round_of()
        assert end_one().day == today() - (DAY if age == 0 else 0 * DAY)
    round_of()
    assert not any(one.is_detaching for one in partitions())
    round_of()
    assert end_one().day == today()


@on_postgresql
def test_a_default_partition_made_by_hand_stops_nothing(days, caplog):
    execute(f"CREATE TABLE {HISTORY}_rest PARTITION OF {HISTORY} DEFAULT")
    [old] = days(2)
    ended(3, day=old, due_in=-timedelta(seconds=1))
    round_of()
    assert History.objects.count() == 0
    assert end_one().day == today()
    assert "default partition" in caplog.text


@on_postgresql
@pytest.mark.parametrize(
    ("failure", "error"),
    [
        ("RAISE EXCEPTION 'no space left on device' USING ERRCODE = '53100'", "no space left"),
        (None, "permission denied"),
    ],
    ids=["no disk", "no right"],
)
def test_a_day_that_cannot_be_added_is_logged_once_and_jobs_end(days, caplog, failure, error):
    [old] = days(3)
    for one in partitions():
        if one.first > today():
            execute(f"DROP TABLE {one.name}")
    ended(3, day=old, due_in=-timedelta(days=2))
    if failure:
        execute(f"CREATE FUNCTION fails() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN {failure}; END $$")
        execute("CREATE EVENT TRIGGER fails ON ddl_command_start WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION fails()")
    else:
        execute("CREATE ROLE faktory_limited")
        execute("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO faktory_limited")
        execute("GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO faktory_limited")
        execute("SET ROLE faktory_limited")
    try:
        keeper = Retention(Store())
        keeper.run()
        lines = [one.getMessage() for one in caplog.records if f"change=add day={today() + DAY}" in one.getMessage()]
        assert len(lines) == 1
        assert error in lines[0]
        assert end_one().day == today()
        keeper.run()
        assert caplog.text.count(f"change=add day={today() + DAY}") == 1
        assert History.objects.count() == 1, "rows that are due for long leave one by one"
    finally:
        execute("RESET ROLE")
        if failure:
            execute("DROP EVENT TRIGGER fails")
            execute("DROP FUNCTION fails()")
        else:
            execute("DROP OWNED BY faktory_limited")
            execute("DROP ROLE faktory_limited")
    round_of()
    assert today() + DAY in firsts()


@partitioned
def test_a_clock_that_jumps_or_goes_back_loses_no_end(days):
    round_of()
    now = timezone.now()
    by_day = {}
    for jump in (
        timedelta(days=1),
        timedelta(0),
        timedelta(days=14),
        timedelta(days=20),
        -timedelta(days=1),
        timedelta(days=400),
    ):
        by_day[jump] = end_one(Store(now=now + jump)).day
    assert by_day[timedelta(days=1)] == today() + DAY
    assert by_day[timedelta(0)] == today()
    assert by_day[timedelta(days=14)] == today() + 14 * DAY
    if IS_POSTGRESQL:
        assert by_day[timedelta(days=20)] == today() + 14 * DAY
        assert by_day[-timedelta(days=1)] == KEPT
    assert by_day[timedelta(days=400)] == KEPT
    # The round of a server with the wrong time adds the days that it believes in; the others are added later.
    round_of(now=now + timedelta(days=100))
    round_of()
    assert end_one().day == today()


@on_postgresql
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_restored_dump_works_and_gets_its_days(days, tmp_path):
    [yesterday] = days(1)
    ended(2, day=yesterday, due_in=timedelta(hours=1))
    execute(f"DROP TABLE {HISTORY}_{today():%Y%m%d}")  # the dump is from yesterday
    settings = connection.settings_dict
    environment = os.environ | {
        "PGPASSWORD": settings["PASSWORD"],
        "PGHOST": settings["HOST"],
        "PGUSER": settings["USER"],
    }
    environment["PGPORT"] = str(settings["PORT"])
    name, restored = f"{settings['NAME']}_restored", connections["other"]
    own_name = restored.settings_dict["NAME"]
    subprocess.run(["pg_dump", "-Fc", "-f", tmp_path / "dump", settings["NAME"]], env=environment, check=True)
    with connection._nodb_cursor() as cursor:
        cursor.execute(f'CREATE DATABASE "{name}"')
    try:
        subprocess.run(["pg_restore", "-d", name, tmp_path / "dump"], env=environment, check=True)
        restored.close()
        restored.settings_dict["NAME"] = name
        assert end_one(alias="other").day == yesterday
        Retention(Store("other")).run()
        assert [one.first for one in partitions("other")][-15:] == [today() + n * DAY for n in range(15)]
        assert end_one(alias="other").day == today()
        assert History.objects.using("other").count() == 4
    finally:
        restored.close()
        restored.settings_dict["NAME"] = own_name
        with connection._nodb_cursor() as cursor:
            cursor.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@partitioned
def test_a_users_delete_and_update_reach_every_day(days):
    [old] = days(2)
    ended(2, day=old, due_in=timedelta(hours=1))
    end_one()
    assert Job.objects.succeeded().update(backtrace=3) == 3
    assert Job.objects.all().delete()[0] == 3
    assert History.objects.count() == 0


# --- the export


def test_rows_are_exported_before_they_leave_one_by_one():
    exported = []
    pks = ended(3, day=KEPT, due_in=-timedelta(seconds=1))
    due.purge(Store(export=lambda day, rows: exported.append((day, set(rows.values_list("pk", flat=True))))))
    assert exported == [(None, set(pks))]
    assert not History.objects.exists()


@partitioned
def test_a_day_is_exported_once_before_it_leaves(days):
    [old] = days(2)
    pks = ended(3, day=old, due_in=-timedelta(seconds=1))
    exported = []
    keeper = Retention(Store(export=lambda day, rows: exported.append((day, set(rows.values_list("pk", flat=True))))))
    with reader():
        keeper.run()
    keeper.run()
    assert exported == [(old, set(pks))]
    assert not History.objects.exists()


def refuse(day, rows):
    raise ValueError("the bucket is full")


@partitioned
def test_an_export_that_fails_raises_an_alarm_and_delays_retention_for_a_week(days, caplog):
    late, later = days(10, 9)
    ended(1, day=late, due_in=-timedelta(days=6))
    ended(1, day=later, due_in=-timedelta(days=8))
    round_of(export=refuse)
    assert set(History.objects.values_list("day", flat=True)) == {late}
    assert "the bucket is full" in caplog.text
    assert "failed-export" in [alarm.kind for alarm in alarms.read_now(using="default")]
    round_of(export=lambda day, rows: None)
    assert not History.objects.exists()
    assert "failed-export" not in [alarm.kind for alarm in alarms.read_now(using="default")]


@partitioned
def test_one_node_at_a_time_exports(days):
    [old] = days(2)
    ended(1, day=old, due_in=-timedelta(seconds=1))
    runs, may_end, begun = [], threading.Event(), threading.Event()

    def export(day, rows):
        runs.append(day)
        begun.set()
        may_end.wait(30)

    nodes = [Retention(Store(export=export)) for _ in range(2)]
    nodes[0].start()
    assert begun.wait(30)
    nodes[0].start()
    nodes[1].start()
    nodes[1].join(30)
    may_end.set()
    nodes[0].join(30)
    assert runs == [old]
    assert not History.objects.exists()
