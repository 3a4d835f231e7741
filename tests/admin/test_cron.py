"""Test cron entries in the admin: the list, the next times, the history, the buttons, and editing entries."""

from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse
from django.utils import timezone

from django_faktory.models import CronEntry, CronRun, Job
from django_faktory.store.cron import entries
from tests.project import tasks as work

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]

NEW = {
    "name": "nightly",
    "schedule": "30 2 * * *",
    "zone": "Europe/Berlin",
    "jobtype": "ring",
    "queue": "",
    "args": "[1, 1.50]",
    "kwargs": "{}",
    "job": '{"retry": 3}',
    "missed": "once",
    "window_s": "3600",
    "overlap": "skip",
}


def address(name, *args):
    return reverse(f"admin:django_faktory_cronentry_{name}", args=args)


def page(client, name, *args, **query):
    return client.get(address(name, *args), query).content.decode()


@pytest.fixture
def entry():
    made = CronEntry(name="hourly <b>", schedule="0 * * * *", zone="Europe/Berlin", jobtype="ring")
    entries.save(made, using="default")
    return made


@pytest.fixture
def of_code():
    entries.sync([entries.CronDefinition("of code", "0 3 * * *", "UTC", work.noop.jobtype)], using="default")
    return CronEntry.objects.get(name="of code")


def add(client, **changes):
    return client.post(address("add"), NEW | changes, follow=True).content.decode()


def test_the_list_shows_the_next_run_in_the_zone_of_the_entry(admin_client, entry):
    text = page(admin_client, "changelist")
    assert "hourly &lt;b&gt;" in text
    assert ":00:00 CE" in text
    assert "active" in text


def test_entries_are_filtered_by_state(admin_client, entry, of_code):
    CronEntry.objects.create(name="broken", schedule="* *", zone="UTC", jobtype="ring", problem="schedule: no")
    CronEntry.objects.create(name="gone", schedule="@daily", zone="UTC", jobtype="ring", removed_at=timezone.now())
    entries.pause([entry.pk], using="default")
    states = {"active": "of code", "paused": "hourly &lt;b&gt;", "never runs": "broken", "removed from code": "gone"}
    for state, name in states.items():
        text = page(admin_client, "changelist", state=state)
        assert (text.count('class="action-select"'), f">{name}</a>" in text) == (1, True), state
    assert page(admin_client, "changelist").count('class="action-select"') == 4


def test_the_page_shows_the_next_five_runs_in_zone_and_utc(admin_client, entry):
    text = page(admin_client, "change", entry.pk)
    assert text.count(" UTC</div>") == 5
    for tick in (entry.next_at + timedelta(hours=number) for number in range(5)):
        assert f"{tick:%Y-%m-%d %H:%M:%S} UTC" in text
    assert "At the start of every hour" in text or "Every hour" in text


def test_the_run_history_shows_the_outcome_of_each_job(admin_client, entry):
    CronRun.objects.create(entry=entry, tick=datetime(2026, 5, 1, 12, tzinfo=UTC), outcome="overlapped")
    CronRun.objects.create(entry=entry, tick=None, outcome="refused", note="ValueError: <no>")
    admin_client.post(address("act", entry.pk, "run_now"))
    job = Job.objects.get()
    Job.objects.update(state="dead", finished_at=timezone.now(), purge_at=timezone.now())
    text = page(admin_client, "change", entry.pk)
    assert "2026-05-01 14:00:00 CEST" in text
    assert "overlapped" in text
    assert "ValueError: &lt;no&gt;" in text
    assert f"?q={job.jid}" in text
    assert "<td>dead</td>" in text


def test_an_entry_created_in_the_admin_is_scheduled(admin_client):
    text = add(admin_client)
    assert "No task of this project is called ring" in text
    made = CronEntry.objects.get()
    assert (made.origin, made.args, made.job, made.overlap) == ("admin", "[1,1.5]", '{"retry":3}', "skip")
    assert made.next_at > timezone.now()


def test_an_entry_created_in_the_admin_can_have_typed_arguments(admin_client):
    args = '[{"$type": "decimal", "value": "1.20"}]'
    assert "No task of this project" not in add(admin_client, jobtype=work.returns_types.jobtype, args=args, job="{}")
    admin_client.post(address("act", CronEntry.objects.get().pk, "run_now"))
    assert '"args":[{"$type":"decimal","value":"1.20"}]' in Job.objects.get().payload


@pytest.mark.parametrize(
    "field", [{"zone": "Mars"}, {"zone": ""}, {"schedule": "every day"}, {"args": "{"}, {"kwargs": "[1]"}, {"job": "["}]
)
def test_the_pages_show_a_row_that_was_written_elsewhere_and_is_wrong(admin_client, field):
    row = CronEntry.objects.create(**{"name": "bad", "schedule": "* * * * *", "zone": "UTC", "jobtype": "x"} | field)
    assert "bad" in page(admin_client, "changelist")
    assert "bad" in page(admin_client, "change", row.pk)


def test_editing_the_schedule_updates_the_next_run_and_other_edits_keep_it(admin_client):
    add(admin_client)
    made = CronEntry.objects.get()
    admin_client.post(address("change", made.pk), NEW | {"queue": "bells"})
    queued = CronEntry.objects.get()
    assert (queued.queue, queued.next_at, queued.args) == ("bells", made.next_at, made.args)
    admin_client.post(address("change", made.pk), NEW | {"schedule": "* * * * *"})
    assert CronEntry.objects.get().next_at <= timezone.now() + timedelta(minutes=1)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("schedule", "61 * * * *", "minute: expected 0-59"),
        ("zone", "Mars", "expected the name of a time zone"),
        ("args", "{", "invalid JSON"),
        ("args", "{}", "expected a list"),
        ("kwargs", '{"a": 1}', "only tasks of this project"),
        ("job", '{"retry": "x"}', "retry: expected an integer"),
        ("job", '{"at": 1}', "expected one of retry"),
        ("queue", "no spaces", "queue names must match"),
        ("jobtype", work.noop.jobtype, "cannot be called"),
        ("window_s", "0", "expected whole seconds"),
        ("name", "", "This field is required"),
    ],
)
def test_errors_are_shown_at_their_field_and_nothing_is_saved(admin_client, field, value, message):
    job = {"job": "{}"} if field == "jobtype" else {}
    response = admin_client.post(address("add"), NEW | {field: value} | job)
    errors = response.context["adminform"].form.errors
    assert message in str(errors.get(field) or errors.get("args"))
    assert not CronEntry.objects.exists()


def test_buttons_pause_resume_and_run_an_entry_with_a_reason(admin_client, entry):
    def press(verb):
        why = {"why": f"to {verb} it"}
        return admin_client.post(address("act", entry.pk, verb), why, follow=True).content.decode()

    assert "ourly &lt;b&gt;: paused." in press("pause")
    text = page(admin_client, "change", entry.pk)
    assert ("Resume</button>" in text, "Pause</button>" in text) == (True, False)
    assert "enqueued as " in press("run_now")
    assert "resumed." in press("resume")
    assert CronEntry.objects.get().next_at is not None
    assert Job.objects.get().jobtype == "ring"
    messages = LogEntry.objects.order_by("pk").values_list("change_message", flat=True)
    assert [message.partition(": ")[2] for message in messages] == ["to pause it", "to run_now it", "to resume it"]


def test_list_actions_pause_resume_and_run_several_entries(admin_client, entry, of_code):
    def act(action):
        asked = {"action": action, "_selected_action": [entry.pk, of_code.pk]}
        return admin_client.post(address("changelist"), asked, follow=True).content.decode()

    assert act("pause").count(": paused.") == 2
    assert CronEntry.objects.filter(paused_at=None).count() == 0
    assert act("pause").count("was paused already.") == 2
    assert act("run_now").count("enqueued as ") == 2
    assert act("resume").count(": resumed.") == 2
    assert act("resume").count("was not paused.") == 2
    assert set(Job.objects.values_list("jobtype", flat=True)) == {"ring", work.noop.jobtype}


def test_a_run_that_cannot_be_enqueued_is_reported_and_recorded(admin_client, entry):
    CronEntry.objects.update(jobtype=work.once_a_group.jobtype, args='["a"]')
    for expected in ("enqueued as", "NotUnique: Job not unique"):
        assert expected in admin_client.post(address("act", entry.pk, "run_now"), follow=True).content.decode()
    assert [run.outcome for run in CronRun.objects.order_by("pk")] == ["enqueued", "refused"]


def test_entries_defined_in_code_cannot_be_edited_in_the_admin(admin_client, of_code):
    text = page(admin_client, "change", of_code.pk)
    assert 'name="schedule"' not in text
    assert ("Pause</button>" in text, 'name="_save"' in text) == (True, False)
    admin_client.post(address("change", of_code.pk), NEW)
    assert CronEntry.objects.get().schedule == "0 3 * * *"
    assert admin_client.post(address("delete", of_code.pk), {"post": "yes"}).status_code == 403
    entries.sync([], using="default")
    text = page(admin_client, "change", of_code.pk)
    assert "removed from code" in text
    assert "Pause</button>" not in text
    assert admin_client.post(address("delete", of_code.pk), {"post": "yes"}).status_code == 302


def test_an_unparsable_schedule_is_reported_and_breaks_no_page(admin_client, entry):
    CronEntry.objects.update(schedule="61 * * * *", problem="in English", next_at=None)
    for text in (page(admin_client, "changelist"), page(admin_client, "change", entry.pk)):
        assert "minute: expected 0-59" in text
