"""Cron entries of tasks and settings: how they are read, which errors they report, and the jobs they enqueue."""

import json
import threading
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from django.core.management import call_command
from django.test import override_settings
from django.utils import timezone

from django_faktory import Cron
from django_faktory.backend import InvalidTask
from django_faktory.checks import cron
from django_faktory.errors import MissingObject
from django_faktory.models import CronEntry, CronRun, Job
from django_faktory.runtime.maintenance import Maintenance
from django_faktory.store.cron import entries as rows
from django_faktory.store.cron import runs
from django_faktory.tasks import base
from django_faktory.tasks import cron as cron_entries
from tests.project import tasks as work
from tests.project.models import Mark
from tests.waiting import wait_until

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]

NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
RING = {"schedule": "0 12 * * *", "jobtype": "ring", "args": [1, "two"], "zone": "UTC"}


@pytest.fixture
def in_settings():
    """Return a function that overrides `FAKTORY["CRON"]`."""
    changes = []

    def change(**entries):
        changes.append(override_settings(FAKTORY={"CRON": entries}))
        changes[-1].enable()

    yield change
    for one in reversed(changes):
        one.disable()


@pytest.fixture(autouse=True)
def task(monkeypatch):
    """Define tasks that are unregistered at the end; cron entries of the example project are hidden meanwhile."""
    base.autodiscover()
    others = {name: known for name, known in base._registry.items() if not known.cron}
    monkeypatch.setattr(base, "_registry", others)
    return base.task


def greet(name, loud=False):
    pass


def idle():
    pass


def take(now=NOON):
    return runs.enqueue_due_runs(cron_entries.enqueue, using="default", now=now)


def begin(now=NOON - timedelta(hours=1)):
    rows.sync(cron_entries.definitions(), using="default", now=now)


def test_a_task_with_a_cron_line_gets_an_entry_with_its_options(task):
    task(cron=Cron("0 12 * * *", zone="UTC"), queue_name="mail", name="greet", max_attempts=3)(idle)
    begin()
    entry = CronEntry.objects.get()
    assert (entry.name, entry.origin, entry.jobtype, entry.zone) == ("greet", "code", "greet", "UTC")
    assert take() == {"mail"}
    job = Job.objects.get()
    assert (job.jobtype, job.queue, job.retry) == ("greet", "mail", 2)


def test_a_cron_line_without_a_zone_uses_the_project_time_zone(task, settings):
    settings.TIME_ZONE = "Asia/Tokyo"
    task(cron="0 12 * * *", name="greet")(idle)
    begin()
    entry = CronEntry.objects.get()
    assert (entry.zone, entry.next_at) == ("Asia/Tokyo", datetime(2026, 5, 2, 3, 0, tzinfo=UTC))


def test_a_task_may_have_several_entries_each_with_its_arguments(task):
    several = [
        Cron("0 12 * * *", name="to Ada", zone="UTC", args=["Ada"], queue="slow"),
        Cron("0 14 * * *", name="to Bob", zone="Europe/Berlin", kwargs={"name": "Bob", "loud": True}, overlap="skip"),
    ]
    task(cron=several)(greet)
    begin()
    assert take() == {"slow", "default"}
    payloads = [json.loads(text) for text in Job.objects.order_by("queue", "pk").values_list("payload", flat=True)]
    assert [job["args"] for job in payloads] == [[], ["Ada"]]
    assert payloads[0]["custom"]["kwargs"] == {"name": "Bob", "loud": True}


def test_cron_arguments_are_encoded_as_in_any_enqueue(in_settings):
    mark = Mark.objects.create(text="here")
    args = [Decimal("1.20"), mark, {"$type": "mine"}]
    in_settings(types={"zone": "UTC", "schedule": "0 12 * * *", "task": work.returns_types.jobtype, "args": args})
    begin()
    take()
    assert json.loads(Job.objects.get().payload)["args"] == [
        {"$type": "decimal", "value": "1.20"},
        {"$model": "project.mark", "pk": mark.pk},
        {"$type": "dict", "value": {"$type": "mine"}},
    ]


def test_a_deleted_argument_is_recorded_in_the_run_history(in_settings):
    mark = Mark.objects.create(text="here")
    in_settings(types={"zone": "UTC", "schedule": "0 12 * * *", "task": work.returns_types.jobtype, "args": [mark]})
    begin()
    mark.delete()
    take()
    run = CronRun.objects.get()
    assert (run.outcome, run.note.split(":")[0]) == ("refused", MissingObject.__name__)


def test_a_foreign_jobtype_entry_enqueues_the_job_a_client_would_push(in_settings):
    in_settings(ring=RING | {"queue": "bells", "job": {"retry": 3, "priority": 9, "custom": {"x": 1.50}}})
    begin()
    assert take() == {"bells"}
    job = Job.objects.get()
    payload = json.loads(job.payload)
    assert payload == {"jid": job.jid, "jobtype": "ring", "queue": "bells", "args": [1, "two"], **payload}
    assert (job.retry, job.priority, payload["custom"]) == (3, 100, {"x": 1.5})


def test_custom_options_apply_to_jobs_of_other_languages(in_settings):
    in_settings(ring=RING | {"schedule": "0 * * * *", "job": {"custom": {"unique_for": 86_400, "expires_in": 60}}})
    begin()
    take()
    take(NOON + timedelta(hours=1))
    assert list(CronRun.objects.order_by("pk").values_list("outcome", flat=True)[1:]) == ["refused"]
    assert Job.objects.get().expires_at is not None


# --- errors are reported


def problems(**entries):
    with override_settings(FAKTORY={"CRON": entries}):
        return [(error.id.rpartition(".")[2], error.msg, error.hint) for error in cron.check_cron()]


@pytest.mark.parametrize(
    ("change", "number", "text", "hint"),
    [
        ({"schedule": "61 * * * *"}, "E040", 'minute: expected 0-59', "docs/cron.md"),
        ({"schedule": None}, "E040", "schedule: expected a cron expression", "docs/cron.md"),
        ({"zone": "Europe/Berlni"}, "E041", "zone: expected", "Did you mean 'Europe/Berlin'?"),
        ({"zone": 7}, "E041", "zone: expected", "tzdata"),
        ({"jobtype": None, "task": "tests.project.tasks.nop"}, "E042", "is called", "'tests.project.tasks.noop'?"),
        ({"jobtype": None, "task": "quite.else"}, "E042", "is called 'quite.else'", '"jobtype" instead'),
        ({"args": [object()]}, "E043", "args: JSON cannot hold it", "docs/arguments.md"),
        ({"args": [float("nan")]}, "E043", "args: JSON cannot hold it", "docs/arguments.md"),
        ({"args": "one"}, "E043", "args: expected a list", "docs/arguments.md"),
        ({"jobtype": 5}, "E044", "jobtype: expected", "cron.md"),
        ({"kwargs": {"a": 1}}, "E043", "kwargs: only tasks of this project", "docs/arguments.md"),
        ({"jobtype": None, "task": work.add.jobtype, "args": [1]}, "E043", "missing a required", "docs/arguments.md"),
        ({"jobtype": None, "task": work.noop.jobtype, "args": 5}, "E043", "expected a list", "docs/arguments.md"),
        ({"jobtype": None, "task": work.echo.jobtype, "args": [object()]}, "E043", "args[0]", "docs/arguments.md"),
        ({"jobtype": None, "task": work.noop.jobtype, "args": [], "job": {"retry": 1}}, "E044", "@task", "cron.md"),
        ({"task": "also"}, "E044", "task or jobtype: expected either", "cron.md"),
        ({"every": 5}, "E044", "every: no such key", "cron.md"),
        ({"missed": "never"}, "E044", "missed: expected", "cron.md"),
        ({"window": "1h"}, "E044", "window: expected", "cron.md"),
        ({"overlap": "queue"}, "E044", "overlap: expected", "cron.md"),
        ({"queue": "no spaces"}, "E044", "queue: ", "cron.md"),
        ({"queue": 7}, "E044", "queue: ", "cron.md"),
        ({"job": {"at": "2026-01-01T00:00:00Z"}}, "E044", "job.at: expected one of", "cron.md"),
        ({"job": {"priority": 11}}, "E044", "priority", "cron.md"),
        ({"job": []}, "E044", "job: expected a dict", "cron.md"),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_an_error_that_names_the_field_and_the_remedy(change, number, text, hint):
    entry = {key: value for key, value in (RING | change).items() if not (key == "jobtype" and value is None)}
    [(found, message, remedy)] = problems(ring=entry)
    assert message.startswith("FAKTORY['CRON']['ring']: ")
    assert (found, text in message, hint in remedy) == (number, True, True), (found, message, remedy)


def test_a_malformed_cron_entry_is_an_error():
    assert [number for number, _, _ in problems(ring="0 * * * *")] == ["E044"]
    with override_settings(FAKTORY={"CRON": {7: RING}}):
        [error] = cron.check_cron()
    assert "name: expected 1 to 255 printable characters" in error.msg


def test_valid_cron_entries_pass_the_check():
    assert problems(ring=RING, task={"schedule": "@daily", "task": work.add.jobtype, "kwargs": {"a": 1, "b": 2}}) == []


def test_a_name_taken_twice_is_an_error_that_names_both(task):
    task(cron=Cron("0 * * * *", name="ring"), name="chime")(idle)
    [(number, message, _)] = problems(ring=RING)
    assert number == "E044"
    assert 'name: "ring" is the name of task ' in message


def test_a_cron_entry_with_missing_task_arguments_is_an_error(task):
    task(cron="0 * * * *", name="greet")(greet)
    [(number, message, _)] = problems()
    assert number == "E043"
    assert "greet cannot be called with them: missing a required argument: 'name'" in message


@pytest.mark.parametrize("value", ["61 * * * *", 5, ["0 * * * *"], None])
def test_a_task_with_an_invalid_cron_line_is_refused_at_definition(value):
    with pytest.raises(InvalidTask, match="cron: schedule: "):
        base.task(cron=value)(greet)


# --- on a node


EACH_NOON = {"schedule": "0 12 * * *", "zone": "UTC", "jobtype": "ring", "next_at": NOON}
EACH_SECOND = RING | {"schedule": "* * * * * *"}


def test_a_node_enqueues_due_entries_and_notifies_fetchers(start_maintenance, in_settings):
    in_settings(ring=EACH_SECOND | {"queue": "bells"})
    announced, heard = [], threading.Event()
    start_maintenance(on_work=lambda queues: (announced.append(queues), heard.set()))
    assert heard.wait(60)
    assert announced[0] == {"bells"}
    run = CronRun.objects.earliest("pk")
    assert timedelta(0) <= run.at - run.tick < timedelta(seconds=10)


@pytest.mark.slow
def test_edits_pauses_and_new_entries_take_effect_without_a_restart(start_maintenance):
    start_maintenance()
    entry = CronEntry(name="ring", schedule="0 0 1 1 *", zone="UTC", jobtype="ring")
    rows.save(entry, using="default")
    entry.schedule = "* * * * * *"
    rows.save(entry, using="default")
    wait_until(lambda: CronRun.objects.count() >= 2)
    entry.queue = "bells"
    rows.save(entry, using="default")
    wait_until(lambda: Job.objects.filter(queue="bells").exists())
    rows.pause([entry.pk], using="default")
    paused_at = CronEntry.objects.get().paused_at
    wait_until(lambda: timezone.now() > paused_at + timedelta(seconds=2.5))
    assert CronRun.objects.latest("tick").tick <= paused_at
    rows.resume([entry.pk], using="default")
    wait_until(lambda: CronRun.objects.filter(tick__gt=paused_at).exists())


@pytest.mark.parametrize("is_fixture", [False, True])
def test_a_row_written_by_a_fixture_or_the_orm_runs_on_a_node_and_a_bad_one_is_reported(
    start_maintenance, is_fixture, tmp_path, caplog
):
    made = {"schedule": "* * * * * *", "zone": "UTC", "jobtype": "ring"}
    if is_fixture:
        fixture = tmp_path / "entries.json"
        model = "django_faktory.cronentry"
        bad = {"model": model, "fields": made | {"name": "bad", "zone": "Mars", "created_at": str(NOON)}}
        good = {"model": model, "fields": made | {"name": "good", "created_at": str(NOON)}}
        fixture.write_text(json.dumps([bad, good]))
        call_command("loaddata", fixture, verbosity=0)
    else:
        CronEntry.objects.create(name="bad", **made | {"zone": "Mars"})
        CronEntry.objects.create(name="good", **made)
    start_maintenance()
    wait_until(lambda: CronRun.objects.filter(entry__name="good", outcome="enqueued").exists())
    assert CronEntry.objects.get(name="bad").problem.startswith("zone: expected")
    assert "cron entry disabled, its schedule is invalid name=bad" in caplog.text


@pytest.mark.parametrize(
    ("field", "note"),
    [
        ({"args": '{"name": 1}'}, "args: expected a list"),
        ({"kwargs": "[]"}, "args: expected a list, and kwargs a dict"),
        ({"args": "{"}, "invalid JSON"),
        ({"args": "[1, 2, 3]"}, "too many positional arguments"),
        ({"queue": "no queue"}, "queue names must match"),
    ],
)
def test_a_row_with_a_wrong_call_is_recorded_as_refused_and_stops_no_other(task, field, note):
    jobtype = task(greet).jobtype
    CronEntry.objects.create(name="bad", **{**EACH_NOON, "jobtype": jobtype, "args": '["Ada"]', **field})
    CronEntry.objects.create(name="good", **EACH_NOON)
    take()
    bad, good = CronRun.objects.order_by("entry__name")
    assert (bad.outcome, good.outcome) == ("refused", "enqueued")
    assert note in bad.note


def test_maintenance_wakes_at_the_next_tick_and_otherwise_every_second(in_settings):
    in_settings(ring=RING | {"schedule": "* * * * *"})
    loop = Maintenance("default")
    loop.run_once()
    entry = CronEntry.objects.get()
    CronEntry.objects.update(next_at=timezone.now() + timedelta(seconds=0.6))
    assert 0.3 < loop._round() < 0.7  # measured by two clocks
    CronEntry.objects.update(next_at=timezone.now() + timedelta(seconds=40))
    assert loop._round() == 1.0
    entry.delete()
    assert loop._round() == 1.0


def test_a_node_retries_after_failing_to_read_the_entries(in_settings, caplog):
    in_settings(ring=RING | {"schedule": "* *"})
    loop = Maintenance("default", retry_after_s=0.0)
    loop._round()
    assert "maintenance step failed step=cron entries of code" in caplog.text
    in_settings(ring=RING)
    loop._round()
    assert CronEntry.objects.get().name == "ring"
