"""Test the form of a task's arguments, on the page that edits a job and on the page *Run a task*."""

import json
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Literal
from uuid import UUID

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import override_settings
from django.urls import reverse
from django.utils import timezone

from django_faktory import task
from django_faktory.admin.jobs.arguments_form import ArgumentsForm
from django_faktory.models import Job
from django_faktory.operations.edit import call_of
from example_project.shop.models import Order
from tests.admin.pages import words
from tests.admin.test_arguments import deliver, job_of
from tests.factories import staff_user
from tests.hostile import JOINED, elements, unwelcome
from tests.project.tasks import add, echo, noop

pytestmark = [pytest.mark.once, pytest.mark.django_db]

MARK = "b7c0d2f4-2f8a-4b0e-9f7a-0d6d5a2f8d11"


class Colour(Enum):
    RED = "r"
    BLUE = "b"


@task
def typed(
    count: int,
    ratio: float = 0.5,
    name: str = "Ada",
    flag: bool = False,
    note: str | None = None,
    mode: Literal["fast", "slow"] = "slow",
    colour: Colour = Colour.RED,
    day: date | None = None,
    at: datetime | None = None,
    price: Decimal = Decimal("1.20"),
    mark: UUID | None = None,
    pause: timedelta | None = None,
    rest: dict | None = None,
):
    """Each type that has a field of its own."""


@task
def needs_all(a: int, b: str, c: list, d: Literal[1, 2]):
    """Take four required arguments."""


@task(plain_json=True)
def plain(value: Decimal):
    """Its arguments carry no references."""


@task
def positional(a, b=2, /, *rest):
    """A later argument needs the earlier ones by position."""


@task
def enqueued_with(order, sent_at: datetime, *, amount: Decimal):
    """Takes an instance and two types that JSON does not have."""


@task(unique_for=600)
def only_once(a: int):
    """Rejects a second job."""


def form_of(task_, *, stored=None, **texts):
    """Return a form to which a browser has sent its initial texts, and these in place of theirs."""
    shown = ArgumentsForm(task_, stored=stored)
    data = {f"arg-{name}": text for name, text in {**shown.initial, **texts}.items() if text is not False}
    return ArgumentsForm(task_, {name: text for name, text in data.items() if text is not None}, stored=stored)


def call(form):
    assert form.is_valid(), form.errors
    return form.args, form.kwargs


def test_defaults_are_shown_and_left_out_of_the_call():
    form = ArgumentsForm(typed)
    assert form.initial["ratio"] == 0.5
    assert form.initial["colour"] == '"r"'
    assert form.initial["price"] == "1.20"
    assert form.fields["count"].required
    assert not form.fields["ratio"].required
    assert call(form_of(typed, count="7")) == ([7], {})


def test_texts_become_values_of_their_types():
    args, kwargs = call(
        form_of(
            typed,
            count="7",
            ratio="2",
            name="",
            flag="on",
            note="",
            mode='"fast"',
            colour='"b"',
            day="2026-05-01",
            at="2026-05-01T12:00:00+02:00",
            price="3",
            mark=MARK,
            pause="P1D",
            rest='{"a": [1]}',
        )
    )
    assert args == [7]
    assert kwargs == {
        "ratio": 2.0, "name": "", "flag": True, "mode": "fast", "colour": "b",
        "day": {"$type": "date", "value": "2026-05-01"},
        "at": {"$type": "datetime", "value": "2026-05-01T12:00:00+02:00"},
        "price": {"$type": "decimal", "value": "3"}, "mark": {"$type": "uuid", "value": MARK},
        "pause": {"$type": "timedelta", "value": "P1DT00H00M00S"}, "rest": {"a": [1]},
    }  # fmt: skip


def test_a_time_without_a_zone_is_in_the_zone_of_the_project():
    with timezone.override("Europe/Berlin"):
        _, kwargs = call(form_of(typed, count="7", at="2026-05-01T12:00:00"))
    assert kwargs["at"]["value"] == "2026-05-01T12:00:00+02:00"


def test_all_errors_are_shown_at_once_at_their_fields():
    form = form_of(needs_all, a="seven", b="", c='{"a":', d="3")
    assert set(form.errors) == {"a", "b", "c", "d"}
    assert set(ArgumentsForm(needs_all, {}).errors) == {"a", "b", "c", "d"}
    wrong = form_of(typed, count="1e5", ratio="nan", day="May", mark="x", price="x", pause="soon", rest="1e999")
    assert set(wrong.errors) == {"count", "ratio", "day", "mark", "price", "pause", "rest"}
    assert set(form_of(deliver, order="1", address='"x"', parcels="{}", options="[]").errors) == {"parcels", "options"}


def test_further_arguments_are_json():
    assert call(form_of(deliver, order="1", address='"x"', parcels="[2, 3]", options='{"colour": 4}')) == (
        [1, "x", 2, 3], {"colour": 4},
    )  # fmt: skip
    assert call(form_of(deliver, order="1", address='"x"')) == ([1, "x"], {})


def test_a_further_keyword_does_not_replace_another_argument():
    form = form_of(deliver, order="1", address='"x"', options='{"address": "y"}')
    assert "address has a field of its own" in str(form.errors)


def test_an_argument_by_position_takes_the_default_of_those_before_it():
    assert call(form_of(positional, a="1", rest="[3]")) == ([1, 2, 3], {})
    assert call(form_of(positional, a="1")) == ([1], {})
    assert call(form_of(positional, a="1", b="5")) == ([1, 5], {})


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ([7], {}),
        ([], {"count": 7, "name": "Ada"}),
        ([7, 0.5, "Ada", False], {"note": None}),
        ([7], {"ratio": 1, "price": {"$type": "decimal", "value": "1.2000"}}),
        # Values that are no texts of their field are edited as JSON.
        (["7"], {"ratio": True, "name": "two\r\nlines", "flag": 1, "note": "", "mode": "other", "day": "today"}),
        ([7], {"name": "\ud83d\x00\u202e", "rest": {"key": [None, {"$type": "uuid", "value": "no"}]}}),
        ([7], {"at": {"$type": "datetime", "value": "2026-05-01T12:00:00.123456Z"}, "mark": {"$model": "x", "pk": 1}}),
    ],
)
def test_a_call_that_is_not_edited_stays_as_it_is(args, kwargs):
    assert call(form_of(typed, stored=(args, kwargs))) == (args, kwargs)


@pytest.mark.parametrize(("args", "kwargs"), [([""], {}), ([None], {}), ([], {"b": {}})])
def test_a_required_argument_without_text_stays_as_it_is(args, kwargs):
    stored = ([1, *args], {"b": "x", "c": [], "d": 2, **kwargs})
    if args:
        del stored[1]["b"]
    assert call(form_of(needs_all, stored=stored)) == stored


def test_an_edit_changes_the_argument_where_the_job_has_it():
    assert call(form_of(typed, stored=([7, 0.5], {"name": "x"}), ratio="3", name="y", flag="on")) == (
        [7, 3.0], {"name": "y", "flag": True},
    )  # fmt: skip
    assert call(form_of(typed, stored=([7, 0.5, "x"], {}), ratio="")) == ([7], {"name": "x"})


# --- the page that edits a job


def edit_url(job):
    return reverse("admin:django_faktory_job_edit", args=[job.pk])


def post_form(client, url, **texts):
    """Send the form of a page as a browser does, with these texts in place of the shown ones."""
    page = client.get(url).context
    data = {f"arg-{name}": text for name, text in page["form"].initial.items() if text not in (False, None)}
    if page.get("seen"):
        data["seen"] = page["seen"]
    return client.post(url, {**data, **texts})


def stored_call(job):
    job.refresh_from_db()
    return call_of(job)


def test_arguments_of_a_known_task_are_edited_in_their_fields(admin_client):
    job = job_of(typed, 7, name="Bob")
    assert post_form(admin_client, edit_url(job), **{"arg-count": "8", "why": "typo"}).status_code == 302
    assert stored_call(job) == ([8], {"name": "Bob"})
    message = LogEntry.objects.get().change_message
    assert message == 'Edited its arguments from [7] {"name":"Bob"} to [8] {"name":"Bob"}: typo'


def test_wrong_arguments_of_a_known_task_are_refused_with_the_input_kept(admin_client):
    job = job_of(typed, 7)
    answer = post_form(admin_client, edit_url(job), **{"arg-count": "seven", "arg-rest": "{"})
    assert set(answer.context["form"].errors) == {"count", "rest"}
    assert 'value="seven"' in answer.content.decode()
    assert stored_call(job) == ([7], {})
    assert not LogEntry.objects.exists()


def test_jobs_of_unknown_tasks_and_mismatched_calls_are_edited_as_json(admin_client):
    unknown = job_of(noop)
    Job.objects.filter(pk=unknown.pk).update(
        jobtype="elsewhere", payload='{"jid":"abcdefgh","jobtype":"elsewhere","args":[1]}'
    )
    for job in (unknown, job_of(add, 1), job_of(echo, {"$encrypted": "gAAAA" + "x" * 200})):
        assert admin_client.get(edit_url(job)).context["form"] is None
    as_json = admin_client.get(edit_url(job_of(typed, 7)) + "?as=json")
    assert as_json.context["form"] is None
    assert admin_client.post(edit_url(unknown), {"args": "[1, 2, 3]", "kwargs": "{}"}).status_code == 302


def test_json_that_the_task_cannot_take_is_refused(admin_client):
    job = job_of(add, 1, 2)
    text = admin_client.post(edit_url(job), {"args": "[1]", "kwargs": "{}"}).content.decode()
    assert "cannot be called with them: missing a required argument" in text
    assert stored_call(job) == ([1, 2], {})


def test_an_edit_of_arguments_that_another_user_has_changed_is_refused_once(admin_client):
    job = job_of(typed, 7)
    first = admin_client.get(edit_url(job)).context["seen"]
    post_form(admin_client, edit_url(job), **{"arg-count": "8"})
    answer = admin_client.post(edit_url(job), {"seen": first, "arg-count": "9"})
    assert "changed meanwhile" in answer.content.decode()
    assert stored_call(job) == ([8], {})
    again = {"seen": answer.context["seen"], "arg-count": "9"}
    assert admin_client.post(edit_url(job), again).status_code == 302
    assert stored_call(job)[0] == [9]


def test_a_form_that_no_longer_fits_the_job_changes_nothing(admin_client):
    job = job_of(add, 1)
    text = admin_client.post(edit_url(job), {"arg-a": "1", "arg-b": "2"}).content.decode()
    assert "The task has changed meanwhile" in text
    assert stored_call(job) == ([1], {})


@pytest.mark.parametrize("hostile", JOINED.values(), ids=JOINED)
def test_hostile_arguments_add_no_element_to_the_form_and_are_preserved(admin_client, hostile):
    harmless = "harmless" if hostile.isprintable() else "harm\nless"
    jobs = [job_of(typed, {text: text}, name=text, note=[text]) for text in (hostile, harmless)]
    pages = [admin_client.get(edit_url(job)).content.decode() for job in jobs]
    assert unwelcome(pages[0]) == []
    assert elements(pages[0]) == elements(pages[1])
    assert post_form(admin_client, edit_url(jobs[0])).status_code == 302
    assert stored_call(jobs[0]) == ([{hostile: hostile}], {"name": hostile, "note": [hostile]})


# --- run a task


RUN = "admin:django_faktory_job_run"


def run_url(task_):
    return f"{reverse(RUN)}?task={task_.jobtype}"


def test_a_task_is_run_with_typed_arguments_and_options(admin_client, django_user_model):
    order = Order.objects.create(customer="ada@example.org", item="Engine", price="1.00")
    answer = admin_client.post(
        run_url(enqueued_with),
        {
            "arg-order": json.dumps({"$model": "shop.order", "pk": order.pk}), "arg-sent_at": "2026-05-01T12:00:00Z",
            "arg-amount": "1.20", "job-queue": "mail", "job-priority": "7", "job-run_at": "2099-01-01T12:00",
            "why": "manually",
        },
    )  # fmt: skip
    job = Job.objects.get()
    assert answer.url == reverse("admin:django_faktory_job_change", args=[job.pk])
    assert (job.queue, job.priority, job.state, job.run_at.year) == ("mail", 7, "scheduled", 2099)
    assert call_of(job) == (
        [{"$model": "shop.order", "pk": order.pk}, {"$type": "datetime", "value": "2026-05-01T12:00:00+00:00"}],
        {"amount": {"$type": "decimal", "value": "1.20"}},
    )
    entry = LogEntry.objects.get()
    assert entry.object_id == str(job.pk)
    assert entry.change_message.startswith("Enqueued manually with [")
    assert entry.change_message.endswith(": manually")


def test_all_errors_of_arguments_and_options_are_shown_at_once(admin_client):
    options = {"job-queue": "no queue", "job-priority": "101", "job-run_at": "0001-01-01T00:00"}
    answer = admin_client.post(run_url(needs_all), {"arg-a": "x", **options})
    assert set(answer.context["form"].errors) == {"a", "b", "c", "d"}
    assert set(answer.context["options"].errors) == {"queue", "priority", "run_at"}
    assert not Job.objects.exists()
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"arg-order": '{"$model": "shop.order", "pk": 0}'}, "does not exist any more"),
        ({"arg-order": '{"$model": "no.model", "pk": 0}'}, "no installed app has this model"),
        ({"arg-order": '{"$type": "no type", "value": 1}'}, "expected"),
    ],
)
def test_a_reference_that_cannot_be_decoded_is_refused(admin_client, values, problem):
    answer = admin_client.post(
        run_url(enqueued_with), {"arg-sent_at": "2026-05-01T12:00:00Z", "arg-amount": "1", **values}
    )
    assert problem in answer.content.decode()
    assert not Job.objects.exists()


def test_a_job_that_is_not_unique_is_refused(admin_client):
    admin_client.post(run_url(only_once), {"arg-a": "1"})
    answer = admin_client.post(run_url(only_once), {"arg-a": "1"})
    assert answer.status_code == 200
    assert answer.context["problem"]
    assert Job.objects.count() == 1


def test_without_permission_to_see_jobs_the_user_returns_to_the_form(client):
    client.force_login(staff_user("add_job"))
    answer = client.post(run_url(noop), follow=True)
    assert answer.redirect_chain == [(run_url(noop), 302)]
    assert f"Enqueued {noop.jobtype} as {Job.objects.get().jid}" in words(answer.content.decode())


def test_links_to_the_page_need_its_permission(client):
    task_page = f"{reverse('admin:django_faktory_task')}?task={add.jobtype}"
    jobs = reverse("admin:django_faktory_job_changelist")
    client.force_login(staff_user("view_job", "view_statistics", "change_job"))
    assert reverse(RUN) not in client.get(task_page).content.decode() + client.get(jobs).content.decode()
    assert client.get(reverse(RUN)).status_code == 403
    client.logout()
    client.force_login(User.objects.create_superuser("all", password="x"))
    assert run_url(add) in client.get(task_page).content.decode()
    assert f'href="{reverse(RUN)}"' in client.get(jobs).content.decode()
    elsewhere = client.get(f"{reverse('admin:django_faktory_task')}?task=elsewhere").content.decode()
    assert reverse(RUN) not in elsewhere


@pytest.mark.parametrize("hostile", JOINED.values(), ids=JOINED)
def test_hostile_names_of_tasks_and_values_add_no_element(admin_client, hostile):
    text = hostile.encode("utf-8", "replace").decode()
    pages = []
    for sent in (text, "harmless"):
        shown = admin_client.get(reverse(RUN), {"task": sent[:500]}).content.decode()
        form = {"arg-count": sent, "arg-rest": sent, "job-queue": sent, "why": sent}
        refused = admin_client.post(run_url(typed), form).content.decode()
        assert unwelcome(shown) == unwelcome(refused) == []
        pages.append((elements(shown), elements(refused)))
    assert pages[0][0] == pages[1][0]
    added = {tag for tag, _ in pages[0][1]} - {tag for tag, _ in pages[1][1]}
    assert added <= {"ul", "/ul", "li", "/li"}, "nothing but lists of errors"
    assert not Job.objects.exists()


def test_hidden_and_encrypted_arguments_are_not_in_the_log(admin_client):
    with override_settings(FAKTORY={"REDACT": "tests.project.redacting.hides_cards"}):
        admin_client.post(run_url(echo), {"arg-args": "[]", "arg-kwargs": '{"card": "m4rk3r"}'})
    assert LogEntry.objects.get().change_message == "Enqueued manually."
    assert "m4rk3r" in Job.objects.get().payload
