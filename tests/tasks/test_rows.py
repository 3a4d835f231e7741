"""`context.each`: the writes of a chunk commit together with the place it reached, and each row is seen once."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from django.db import models, transaction
from django.db.models import Count, F

from django_faktory import JobContext
from django_faktory.brokers import get_broker
from django_faktory.core.job_parser import parse_job
from django_faktory.core.payloads import Ack, Failure, Interruption
from django_faktory.errors import InvalidStep, TaskTimeout
from django_faktory.models import Job, JobStep
from django_faktory.tasks.rows import _Query
from django_faktory.testing import drain, interrupt_after
from django_faktory.worker.execution import prepare
from example_project.shop.models import Invoice, Order
from tests.project.models import Mark
from tests.tasks.programs import (
    again,
    follows,
    follows_async,
    follows_atomically,
    in_secret,  # noqa: F401  (a fixture)
    programs,
    run,
)
from tests.tasks.work import fetched, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def orders():
    """Ten orders, a second apart."""
    Order.objects.bulk_create(
        [Order(pk=100 + number, customer="a@example.org", item=f"{number}", price=1) for number in range(10)]
    )
    return Order.objects.all()


def see(row):
    """Write that the block has got this row."""
    Mark.objects.create(text=str(getattr(row, "item", row)))


def seen():
    return list(Mark.objects.order_by("pk").values_list("text", flat=True))


def walked(**expected):
    """Return what is recorded of the only walk."""
    step = JobStep.objects.get()
    return {name: getattr(step, name) for name in expected or ("done", "total", "is_finished")}


ALL = [str(number) for number in range(10)]


@pytest.mark.parametrize("by", [1, 3, 5, 10, 500])
def test_a_walk_sees_each_row_once_in_its_order(orders, by):
    def program(context):
        with context.each(orders, by=by) as rows:
            for row in rows:
                see(row)

    assert isinstance(run(program), Ack)
    assert seen() == ALL
    assert walked() == {"done": 10, "total": 10, "is_finished": True}


@pytest.mark.parametrize("failing", range(10))
def test_an_error_undoes_its_chunk_and_the_next_run_continues_there(orders, failing):
    def program(context):
        with context.each(orders, by=4) as rows:
            for row in rows:
                see(row)
                if row.item == str(failing) and context.attempt == 1:
                    raise ValueError

    assert isinstance(run(program), Failure)
    committed = failing // 4 * 4
    assert (seen(), JobStep.objects.filter(done=committed or None).count()) == (ALL[:committed], int(committed > 0))
    assert isinstance(again(), Ack)
    assert seen() == ALL


@pytest.mark.parametrize("way", ["break", "return"])
@pytest.mark.parametrize("last", [0, 3, 4, 9])
def test_leaving_the_block_commits_what_was_done_and_ends_the_walk(orders, way, last):
    def program(context):
        with context.each(orders, by=4) as rows:
            for row in rows:
                see(row)
                if row.item == str(last):
                    if way == "return":
                        return
                    break
        if context.attempt == 1:
            raise ValueError

    run(program)
    assert seen() == ALL[: last + 1]
    assert walked() == {"done": last + 1, "total": 10, "is_finished": True}
    if way == "break":
        assert isinstance(again(), Ack)
        assert seen() == ALL[: last + 1], "the walk was over"


def test_a_row_counts_where_it_is_when_the_walk_reaches_its_place(orders):
    """Rows that appear behind the walk are not seen, those that appear ahead are; deleted ones are not."""

    def program(context):
        with context.each(Order.objects.order_by("-pk"), by=2) as rows:
            for row in rows:
                see(row)
                if row.item == "8":
                    Order.objects.create(pk=last + 1, customer="", item="behind", price=1)
                    Order.objects.create(pk=first - 1, customer="", item="ahead", price=1)
                    Order.objects.filter(item="5").delete()

    first, last = Order.objects.order_by("pk").first().pk, Order.objects.order_by("pk").last().pk
    run(program)
    assert seen() == ["9", "8", "7", "6", "4", "3", "2", "1", "0", "ahead"]


def test_a_walk_that_changes_and_deletes_its_rows_continues_behind_them(orders):
    def program(context):
        with context.each(Invoice.objects.order_by("order"), by=2) as rows:
            for row in rows:
                see(row.order_id)
                row.delete()
                if row.order_id == ids[2] and context.attempt == 1:
                    raise ValueError

    for order in orders:
        Invoice.objects.create(order=order)
    ids = [*Invoice.objects.order_by("order_id").values_list("order_id", flat=True)]
    run(program)
    assert Invoice.objects.count() == 8
    again()
    assert (seen(), Invoice.objects.count()) == ([str(one) for one in ids], 0)


def test_rows_that_a_join_repeats_are_seen_once():
    def program(context):
        found = Order.objects.filter(webhookcall__answer__gte=500)
        with context.each(found, by=2) as rows:
            for row in rows:
                see(row)

    for number in range(3):
        order = Order.objects.create(customer="", item=str(number), price=1)
        for _ in range(3):
            order.webhookcall_set.create(answer=503)
    run(program)
    assert seen() == ["0", "1", "2"]


def test_a_chunk_can_be_locked(orders):
    def program(context):
        with context.each(orders.select_for_update(), by=4) as rows:
            for row in rows:
                see(row)

    assert isinstance(run(program), Ack)


# --- iterables


def test_an_iterable_is_walked_by_its_keys():
    def program(context):
        with context.each(ITEMS, key=lambda item: item[0], by=3) as rows:
            for _, text in rows:
                see(text)
                if text == "e" and context.attempt == 1:
                    raise ValueError

    run(program)
    assert seen() == ["a", "b", "c"]
    again()
    assert seen() == [*"abcdefg"]
    assert walked() == {"done": 7, "total": 7, "is_finished": True}


ITEMS = [*enumerate("abcdefg")]


def test_an_iterable_that_changes_between_two_runs_continues_behind_the_key():
    def program(context):
        with context.each(names[-1], key=str, by=2) as rows:
            for name in rows:
                see(name)
                if name == "k" and context.attempt == 1:
                    raise ValueError

    names = [iter(["b", "d", "k"])]
    run(program)
    names.append(["a", "c", "e", "k"])
    again()
    assert seen() == ["b", "d", "e", "k"]


@pytest.mark.parametrize("keys", [[1, 3, 2], [1, 1], [1, "2"], [1.5], [None], [True]])
def test_keys_must_ascend(keys):
    def program(context):
        with context.each(keys, key=lambda key: key, by=1) as rows:
            for row in rows:
                see(row)

    report = run(program)
    assert "key: expected ascending whole numbers or texts" in report.message


# --- orders and places


@pytest.mark.parametrize("order", ["-pk", "jid", "-jid"])
def test_a_run_continues_in_the_order_of_any_unique_field(order):
    def program(context):
        with context.each(Job.live.filter(queue="low").order_by(order), by=2) as rows:
            for row in rows:
                see(row.jid)
                if len(Mark.objects.all()) == 3 and context.attempt == 1:
                    raise ValueError

    for number in range(5):
        follows.using(queue_name="low", run_after=timedelta(days=1)).enqueue(number)
    run(program)
    again()
    expected = [*Job.live.filter(queue="low").order_by(order).values_list("jid", flat=True)]
    assert seen() == expected


def test_places_are_read_as_they_were_written():
    """Each type that may be a unique field keeps its value in the record of a walk."""
    fields = {
        models.IntegerField(): 7,
        models.UUIDField(): UUID("6f1c0a5e-93a1-4d1c-8f0e-5b0c4f6f7a51"),
        models.DateTimeField(): datetime(2026, 5, 1, 12, 0, 0, 123456, tzinfo=UTC),
        models.DurationField(): timedelta(days=1, microseconds=5),
        models.FloatField(): 0.1,
        models.CharField(): "ä'\\",
        models.BinaryField(): b"\x00\xff",
    }
    for field, value in fields.items():
        field.set_attributes_from_name("place")
        query = _Query.__new__(_Query)
        query._field, query._places = field, [value]
        text = query.place(0)
        query.resume(text)
        assert query._reached == value
        assert type(text) is str


# --- the worker


def test_a_stopping_worker_ends_a_walk_behind_its_chunk_and_uses_no_attempt(orders):
    def program(context):
        with context.each(orders, by=3) as rows:
            for row in rows:
                see(row)
                if row.item == "4" and context.attempt == 1 and not stopped:
                    stopped.append(1)
                    execution.control.is_ending = lambda: True

    stopped = []
    programs.append(program)
    follows.enqueue()
    execution = prepare(fetched())
    report = execution.run(get_broker())
    assert isinstance(report, Interruption)
    assert "each 'each' continues behind its 6 rows" in report.message
    assert seen() == ALL[:6]
    get_broker().interrupt([report])
    assert isinstance(work(), Ack)
    assert seen() == ALL


def test_a_timeout_that_no_chunk_meets_names_the_remedy(orders):
    def program(context):
        with context.each(orders, by=3) as rows:
            for row in rows:
                see(row)
                if row.item == stops_at:
                    execution.control.stop(TaskTimeout("the task did not end within its timeout of 5 s"))
                    while True:
                        pass

    for stops_at, part in [("1", "and no chunk of each 'each' did; set a smaller by= than 3"), ("4", "of 5 s")]:
        programs.append(program)
        follows.enqueue()
        execution = prepare(fetched())
        report = execution.run(get_broker())
        assert report.message.endswith(part) or part in report.message
        assert report.message.endswith("of 5 s") == (stops_at == "4")


def test_a_walk_reports_its_progress(orders):
    def program(context):
        with context.each(orders, by=3) as rows:
            for row in rows:
                see(row)

    programs.append(program)
    follows.enqueue()
    execution = prepare(fetched())
    reports = []
    execution.control.report_progress = lambda *report: reports.append(report)
    execution.run(get_broker())
    assert reports == [(30, "", (3, 10)), (60, "", (6, 10)), (90, "", (9, 10)), (100, "", (10, 10))]


def test_a_walk_can_be_interrupted_after_each_chunk_in_tests(orders):
    def program(context):
        with context.each(orders, by=3, name="orders") as rows:
            for row in rows:
                see(row)

    programs.append(program)
    follows.enqueue()
    with interrupt_after("orders"):
        ran = drain()
    assert [one.state for one in ran] == ["enqueued"] * 4 + ["succeeded"]
    assert seen() == ALL


def test_the_places_of_encrypted_jobs_are_encrypted(in_secret):  # noqa: F811
    def program(context):
        with context.each(["a@example.org", "b@example.org"], key=str, by=1) as rows:
            for row in rows:
                see(row)
                if row[0] == "b" and context.attempt == 1:
                    raise ValueError

    run(program, of=in_secret)
    assert "example.org" not in JobStep.objects.get().reached
    again()
    assert seen() == ["a@example.org", "b@example.org"]


# --- what is refused


def walk(rows, **options):
    def program(context):
        with context.each(rows, **options) as found:
            for row in found:
                see(row)

    return program


def without_with(context):
    for row in context.each(Order.objects.all()):
        see(row)


def with_a_step_inside(context):
    with context.each(Order.objects.all()) as rows:
        for row in rows:
            with context.step("a"):
                see(row)


def within_a_step(context):
    with context.step("a"):
        found = context.each(Order.objects.all())
        with found as rows:
            see(*rows)


def twice(context):
    for _ in range(2):
        with context.each(Order.objects.none()) as rows:
            assert [*rows] == []


def in_a_transaction(context):
    with transaction.atomic(), context.each(Order.objects.all()) as rows:
        for row in rows:
            see(row)


@pytest.mark.parametrize(
    ("program", "part"),
    [
        (walk(Order.objects.all()[:5]), "expected a queryset of whole rows, got a slice"),
        (walk(Order.objects.distinct()), "got distinct()"),
        (walk(Order.objects.values("pk")), "got values()"),
        (walk(Order.objects.values_list("pk", flat=True)), "got values()"),
        (walk(Order.objects.all().union(Order.objects.all())), "got a union"),
        (walk(Order.objects.order_by("item")), "expected an order by one unique field without NULL"),
        (walk(Order.objects.order_by("pk", "item")), "got order_by('pk', 'item')"),
        (walk(Order.objects.order_by("?")), "got order_by('?')"),
        (walk(Order.objects.order_by(F("pk").desc())), "expected an order by one unique field"),
        (walk(Job.objects.order_by("unique_key")), "got order_by('unique_key')"),
        (walk(JobStep.objects.all()), "got order_by('pk')"),
        (walk(Order.objects.all(), by=0), "by: expected a whole number from 1 to 100,000, got 0"),
        (walk([1, 2]), "expected a queryset, or an iterable with key=, got list"),
        (walk(Order.objects), "expected a queryset, or an iterable with key=, got Manager"),
        (walk(Order.objects.all(), name=""), "each: expected a name of 1 to 100 printable characters"),
        (without_with, "expected `with context.each(…) as rows:`"),
        (with_a_step_inside, "step 'a': each 'each' is open, and cannot contain another block"),
        (within_a_step, "each 'each': step 'a' is open"),
        (twice, "each 'each': this run had it already"),
        (in_a_transaction, "each 'each': a transaction is open"),
    ],
)
def test_misuse_is_one_error_that_kills_the_job(orders, program, part):
    report = run(program)
    assert part in report.message
    assert report.errtype == "django_faktory.errors.InvalidStep"
    assert (Job.objects.get().state, seen()) == ("dead", [])


def test_annotated_rows_and_another_database_may_be_walked(orders):
    def program(context):
        with context.each(Order.objects.annotate(calls=Count("webhookcall")), by=4) as rows:
            for row in rows:
                see(row)

    assert isinstance(run(program), Ack)
    assert seen() == ALL


def test_a_name_has_one_kind_of_block(orders):
    def program(context):
        if context.attempt == 1:
            with context.step("a"):
                see("a")
            raise ValueError
        walk(Order.objects.all(), name="a")(context)

    run(program)
    assert "an earlier run had a block of another kind with this name" in again().message


def test_walks_of_atomic_and_async_tasks_are_refused(orders):
    async def program(context):
        walk(Order.objects.all())(context)

    assert "a task with atomic=True is one transaction" in run(walk(Order.objects.all()), of=follows_atomically).message
    Job.objects.all().delete()
    programs.append(program)
    follows_async.enqueue()
    report = asyncio.run(prepare(fetched()).arun(get_broker()))
    assert "walk rows in a task that is written as `def`" in report.message
    with pytest.raises(InvalidStep, match="run the task by a worker"):
        JobContext(task_result=None).each([])


def test_a_walk_of_a_jid_pushed_again_begins_at_the_first_row(orders):
    def program(context):
        walk(Order.objects.all(), by=4)(context)
        raise ValueError

    run(program)
    job = Job.objects.get()
    Job.objects.all().kill()
    get_broker().push([parse_job(job.payload)])
    work()
    assert seen() == ALL * 2


def test_a_lost_job_stops_a_walk_at_the_end_of_its_chunk(orders):
    def program(context):
        try:
            walk(Order.objects.all(), by=4)(context)
        except Exception:  # noqa: BLE001
            see("went on")

    programs.append(program)
    follows.enqueue()
    execution = prepare(fetched("w1"))
    get_broker().lost(["w1"])
    assert execution.run(get_broker()) is None
    assert seen() == []
