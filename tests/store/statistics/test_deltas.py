"""Numbers of jobs are sums of deltas: exact at each moment, whoever changed the rows (ADR 0047)."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.utils import timezone

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.lifecycle import KEPT, State
from django_faktory.core.payloads import Ack, FetchRequest
from django_faktory.errors import FunctionsMissing
from django_faktory.models import Delta, History, Job
from django_faktory.store.dialects import dialect_of, triggers
from django_faktory.store.dialects.partitions import DAY
from django_faktory.store.dialects.values import Tally
from django_faktory.store.jobs import bulk
from django_faktory.store.statistics import counts, deltas
from django_faktory.store.store import Store
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db(transaction=True)

USING = "default"
on_postgresql = pytest.mark.skipif(connection.vendor != "postgresql", reason="only PostgreSQL notes marks of folds")


def number(queue="default", state=State.ENQUEUED):
    return counts.read(using=USING).in_queue(queue, state)


def elsewhere(work):
    """Run it in a thread, on another connection."""

    def and_close():
        try:
            return work()
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(and_close).result(60)


def execute(sql, values=()):
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return cursor.fetchall() if cursor.description else None


def count(moment, **tally):
    with connection.cursor() as cursor:
        dialect_of(connection).count(cursor, moment, Tally(**tally))


def test_numbers_follow_a_job_from_its_push_to_its_end():
    broker = OrmBroker(USING)
    JobFactory.create_batch(2, queue="default", result_ttl=60)
    [[job]] = broker.fetch([FetchRequest(queues=("default",), wid="w1")])
    assert (number(), number(state=State.WORKING)) == (1, 1)
    broker.ack([Ack(jid=job.jid, wid="w1")])
    found = counts.read(using=USING)
    assert (found.of(State.ENQUEUED), found.of(State.WORKING), found.of(State.SUCCEEDED)) == (1, 0, 1)
    assert found.totals == {"processed": 1, "failed": 0, "late": 0}
    assert list(found.numbers["succeeded"]) == [History.objects.get().day.isoformat()]


@pytest.mark.parametrize("folds", [False, True])
def test_changes_by_the_orm_count(folds):
    Job.objects.bulk_create(JobFactory.many(5, queue="a"))
    if folds:
        deltas.fold(using=USING)
    Job.live.filter(pk__in=list(Job.live.values_list("pk", flat=True)[:2])).update(queue="b")
    Job.live.filter(queue="b").update(wid="changes no number")
    if folds:
        deltas.fold(using=USING)
    Job.objects.filter(queue="a").delete()
    Job.objects.bulk_create(JobFactory.many(3, queue="c", succeeded=True))
    found = counts.read(using=USING)
    assert (found.queues, found.of(State.SUCCEEDED)) == ({"b": 2}, 3)
    assert deltas.recount(using=USING) == {}


def test_a_rollback_takes_its_numbers_back():
    JobFactory(queue="a")
    with transaction.atomic():
        JobFactory(queue="a")
        with transaction.atomic():
            JobFactory(queue="a")
            transaction.set_rollback(True)
        assert number("a") == 2
        transaction.set_rollback(True)
    assert number("a") == 1


def test_folding_leaves_one_row_for_each_number():
    for _ in range(3):
        elsewhere(lambda: JobFactory.create_batch(4, queue="a"))
    elsewhere(lambda: JobFactory(queue="b"))
    deltas.fold(using=USING)
    rows = Delta.objects.exclude(kind__in=("fold", "open")).values_list("kind", "name", "amount")
    assert sorted(rows) == [("enqueued", "a", 12), ("enqueued", "b", 1)]
    assert not deltas.fold(using=USING)


def test_a_number_that_is_zero_has_no_row_after_a_fold():
    JobFactory(queue="a")
    Job.objects.all().delete()
    deltas.fold(using=USING)
    assert not Delta.objects.filter(name="a").exists()


@pytest.mark.skipif(connection.vendor == "sqlite", reason="one writer")
def test_a_fold_loses_no_delta_of_a_transaction_that_commits_later():
    """It was open at the first fold, and began before rows that the fold has seen."""
    has_written, may_commit = threading.Event(), threading.Event()

    def write_slowly():
        try:
            with transaction.atomic():
                JobFactory(queue="slow")
                has_written.set()
                may_commit.wait(60)
                JobFactory(queue="slow")
        finally:
            connection.close()

    thread = threading.Thread(target=write_slowly)
    thread.start()
    assert has_written.wait(60)
    JobFactory.create_batch(3, queue="fast")
    for _ in range(2):
        deltas.fold(using=USING)
        JobFactory(queue="fast")
    assert (number("fast"), number("slow")) == (5, 0)
    may_commit.set()
    thread.join(60)
    assert (number("fast"), number("slow")) == (5, 2)
    deltas.fold(using=USING)
    assert (number("fast"), number("slow")) == (5, 2)
    assert deltas.recount(using=USING) == {}


def test_a_transaction_that_folds_and_goes_on_loses_nothing():
    with transaction.atomic():
        for size in (1, 2, 3):
            JobFactory(queue="a")
            assert number("a") == size, "not folded yet"
            deltas.fold(using=USING)
            assert number("a") == size
    assert number("a") == 3


def test_numbers_stay_exact_while_connections_write_and_fold():
    def work():
        for turn in range(20):
            jobs = JobFactory.create_batch(3, queue="a")
            Job.live.filter(pk=jobs[0].pk).delete()
            if turn % 5 == 0:
                deltas.fold(using=USING)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(lambda: elsewhere(work)) for _ in range(4)]:
            done.result(120)
    assert number("a") == 160
    assert deltas.recount(using=USING) == {}


@on_postgresql
def test_a_statement_writes_a_row_for_each_number_that_it_changes():
    def rows_of(change):
        known = Delta.objects.count()
        elsewhere(change)
        return Delta.objects.count() - known

    assert rows_of(lambda: Job.objects.bulk_create(JobFactory.many(50, queue="a"))) == 1
    first = Job.live.order_by("pk").first().pk
    one, others = Job.live.filter(pk=first), Job.live.exclude(pk=first)
    for state, queue in ((State.BLOCKED, "a"), (State.BLOCKED, "b"), (State.ENQUEUED, "c")):
        change = {"state": state, "queue": queue}
        for jobs in (one, others):
            assert rows_of(lambda change=change, jobs=jobs: jobs.update(**change)) == 2
        assert number(queue, state) == 50
    for jobs in (one, others):
        assert rows_of(lambda jobs=jobs: jobs.update(wid="changes no number")) == 0
    assert rows_of(one.delete) == 1
    assert rows_of(others.delete) == 1
    assert counts.read(using=USING).numbers == {}


@on_postgresql
def test_a_publication_of_all_tables_refuses_no_fold():
    execute("CREATE PUBLICATION everything FOR ALL TABLES")
    try:
        JobFactory.create_batch(2, queue="a")
        deltas.fold(using=USING)
        assert number("a") == 2
    finally:
        execute("DROP PUBLICATION everything")


@on_postgresql
def test_a_reader_beside_an_old_snapshot_reads_only_rows_of_the_latest_fold():
    """The rows of earlier folds are dead, and cannot be removed while the snapshot is open."""
    JobFactory(queue="a")
    is_open, may_end = threading.Event(), threading.Event()

    def hold_snapshot():
        try:
            with transaction.atomic():
                execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                execute("SELECT 1 FROM django_faktory_delta LIMIT 1")
                is_open.set()
                may_end.wait(120)
        finally:
            connection.close()

    thread = threading.Thread(target=hold_snapshot)
    thread.start()
    assert is_open.wait(60)
    try:
        for _ in range(100):
            jobs = JobFactory.create_batch(20, queue="a")
            Job.live.filter(pk__in=[job.pk for job in jobs]).delete()
            deltas.fold(using=USING)
        assert number("a") == 1
        sql = f"SELECT kind, name, SUM(amount) FROM {dialect_of(connection).current_deltas} AS d GROUP BY kind, name"
        with transaction.atomic():
            execute("SET LOCAL enable_seqscan = off")
            [(plan,)] = execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}")
        assert plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"] <= 40
    finally:
        may_end.set()
        thread.join(60)


@on_postgresql
def test_the_fold_of_another_cluster_hides_no_row():
    """A restored dump has marks of the cluster that it comes from, which may be higher than any of this one."""
    JobFactory.create_batch(2, queue="a")
    deltas.fold(using=USING)
    execute(
        "UPDATE django_faktory_delta SET name = (name::bigint + 1000000)::text, mark = mark"
        " WHERE kind = 'fold' AND mark >= '4611686018427387904'"
    )
    JobFactory(queue="a")
    assert number("a") == 3
    deltas.fold(using=USING)
    JobFactory(queue="a")
    assert number("a") == 4


@on_postgresql
def test_totals_of_old_days_become_one_number():
    now = timezone.now()
    for age in (0, 399, 401, 800):
        count(now - timedelta(days=age), processed=1)
    deltas.fold(using=USING)
    found = counts.read(using=USING)
    assert sorted(found.numbers["processed"].values()) == [1, 1, 2]
    assert found.totals["processed"] == 4


def test_a_recount_corrects_the_numbers_and_returns_by_how_much():
    JobFactory.create_batch(3, queue="a")
    JobFactory(succeeded=True)
    Delta.objects.all().delete()
    assert number("a") == 0
    day = History.objects.get().day.isoformat()
    assert deltas.recount(using=USING, with_history=False) == {("enqueued", "a"): 3}
    assert deltas.recount(using=USING) == {("succeeded", day): 1}
    assert number("a") == 3


def test_the_numbers_of_some_days_go_with_their_rows():
    partitions = dialect_of(connection).partitions.read(connection)
    later = partitions[-1].end - DAY if partitions else KEPT + DAY
    for day in (KEPT, KEPT, later):
        row = JobFactory(succeeded=True)
        History.objects.filter(pk=row.pk).update(day=day)
    with transaction.atomic():
        deltas.forget_days(connection, KEPT, KEPT + DAY)
    assert counts.read(using=USING).numbers["succeeded"] == {later.isoformat(): 1}


def test_a_flush_sets_totals_to_zero():
    count(timezone.now(), processed=5, failed=2)
    deltas.fold(using=USING)
    for step in bulk.flush(Store(USING)):
        step()
    assert counts.read(using=USING).totals == {"processed": 0, "failed": 0, "late": 0}


def test_missing_triggers_are_one_clear_error_until_migrate_creates_them():
    table = " ON django_faktory_job" if connection.vendor == "postgresql" else ""
    execute(f"DROP TRIGGER django_faktory_job_insert{table}")
    triggers.forget()
    try:
        with pytest.raises(FunctionsMissing, match=r"lacks the trigger \w+_job_insert .* migrate"):
            counts.read(using=USING)
        JobFactory(queue="a")
    finally:
        call_command("migrate", verbosity=0)
    assert number("a") == 1, "counted by migrate"


def test_a_flush_by_django_leaves_no_number():
    JobFactory.create_batch(3, queue="a")
    JobFactory(succeeded=True)
    call_command("flush", verbosity=0, interactive=False)
    assert counts.read(using=USING).numbers == {}


def test_a_mark_is_a_number_in_python():
    Delta.objects.create(mark=7, kind="processed", name="2026-01-01", amount=1)
    assert Delta.objects.get(mark=7).mark == 7
