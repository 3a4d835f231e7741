"""Test that a POST to a read-only page writes nothing; actions have addresses of their own."""

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from django_faktory.models import Batch, Job, JobLock, Limit, OutboxEntry, Queue, WorkerProcess
from django_faktory.models.cron import CronEntry
from tests.admin.test_access import APP, MODELS, page, rows, staff_user, stored
from tests.factories import T0

__all__ = ["rows"]  # the fixture

pytestmark = [pytest.mark.django_db, pytest.mark.once]

ONLY_SHOWN = {
    "overview": Queue, "job": Job, "queue": Queue, "workerprocess": WorkerProcess, "batch": Batch, "joblock": JobLock,
    "outboxentry": OutboxEntry, "gearmonkeyfunction": Queue,
}  # fmt: skip


def form_of(row):
    """Return every column in the format that a Django form posts."""
    return {field.name: "" if (value := field.value_from_object(row)) is None else value for field in row._meta.fields}


@pytest.fixture
def user_client(client, admin_user):
    """Log in as a superuser: the permission matrix sends these requests as users with each set of permissions."""
    client.force_login(admin_user)
    return client


@pytest.mark.parametrize("name", ONLY_SHOWN)
def test_a_post_to_a_read_only_page_writes_nothing(user_client, rows, name):
    row = ONLY_SHOWN[name].objects.get(pk=MODELS[name])
    before = stored()
    for button in ({}, {"_save": "1"}, {"_continue": "1"}, {"_saveasnew": "1"}, {"_popup": "1"}):
        answer = user_client.post(page(name, "change", row.pk), form_of(row) | button)
        assert answer.status_code == 405, button
        assert stored() == before, button
    for method in (user_client.put, user_client.patch, user_client.delete):
        assert method(page(name, "change", row.pk)).status_code == 405
    assert stored() == before


def test_a_job_that_died_while_its_page_was_open_stays_dead(user_client, rows):
    """A Django form would restore the state that the job had when the page was read."""
    form = form_of(Job.objects.get(pk=MODELS["job"] + 2))
    Job.objects.filter(pk=MODELS["job"] + 2).update(state="dead", finished_at=T0, purge_at=T0, failures=1)
    assert user_client.post(page("job", "change", MODELS["job"] + 2), form).status_code == 405
    assert Job.objects.get(pk=MODELS["job"] + 2).state == "dead"


@pytest.mark.parametrize("name", ONLY_SHOWN)
def test_adding_a_row_of_a_read_only_model_is_refused(user_client, rows, name):
    form, before = form_of(ONLY_SHOWN[name].objects.get(pk=MODELS[name])), stored()
    for button in ({"_save": "1"}, {"_saveasnew": "1"}):
        assert user_client.post(page(name, "add"), form | button).status_code == 403, button
        assert stored() == before, button


@pytest.mark.parametrize("name", MODELS)
def test_posts_without_a_valid_action_to_list_and_history_write_nothing(user_client, rows, name):
    pk = MODELS[name]
    before = stored()
    posts = [
        {}, {"_save": "Save"}, {"action": ""}, {"action": "no_such", "_selected_action": [pk]},
        {"_selected_action": [pk], "index": "0"},
        {
            "_save": "Save", "form-TOTAL_FORMS": "1", "form-INITIAL_FORMS": "1", "form-0-id": pk, "form-0-name": "x",
            "form-0-state": "enqueued", "form-0-queue": "x",
        },
    ]  # fmt: skip
    for post in posts:
        user_client.post(page(name, "changelist"), post)
        assert stored() == before, post
    assert user_client.post(page(name, "history", pk), {"_save": "1"}).status_code == 405
    assert stored() == before


def test_no_list_has_editable_fields():
    assert [
        site for model, site in admin.site._registry.items() if model._meta.app_label == APP and site.list_editable
    ] == []


def test_a_cron_entry_defined_in_code_is_read_only(user_client, rows):
    CronEntry.objects.update(origin="code")
    row, before = CronEntry.objects.get(), stored()
    answer = user_client.post(page("cronentry", "change", row.pk), form_of(row) | {"schedule": "@hourly"})
    assert answer.status_code == 403
    assert stored() == before


@pytest.mark.parametrize(("name", "model"), [("cronentry", CronEntry), ("limit", Limit)])
def test_cron_entries_and_limits_cannot_be_copied_by_save_as_new(user_client, rows, name, model):
    form = form_of(model.objects.get()) | {"name": "a copy", "_saveasnew": "1"}
    before = stored()
    assert user_client.post(page(name, "change", MODELS[name]), form).status_code == 403
    assert stored() == before


@pytest.mark.parametrize("needed", ["cronentry", "limit"])
def test_a_user_without_view_permission_cannot_open_forms(client, rows, needed):
    client.force_login(staff_user(f"change_{needed}", f"delete_{needed}"))
    for view in ("change", "delete", "history"):
        assert client.get(page(needed, view, MODELS[needed])).status_code == 403
    assert client.get(page(needed, "changelist")).status_code == 403


@pytest.mark.parametrize("name", ["cronentry", "limit"])
@pytest.mark.parametrize("pk", ["0", "none", "99999999999999999999", "a/b"])
def test_an_action_on_a_missing_row_leads_to_the_list(admin_client, name, pk):
    answer = admin_client.post(page(name, "act", pk, "pause"), follow=True)
    assert answer.redirect_chain == [(page(name, "changelist"), 302)]
    assert "no longer exists." in answer.content.decode()


GONE = {
    "job": "deleted after RESULT_TTL",
    "joblock": "the lock was released",
    "workerprocess": "it has stopped, or was lost",
    "batch": "deleted a while after its end",
    "outboxentry": "its job was sent",
    "queue": "perhaps it was deleted",
    "limit": "perhaps it was deleted",
    "cronentry": "perhaps it was deleted",
}


@pytest.mark.parametrize("view", ["change", "history"])
@pytest.mark.parametrize("name", GONE)
def test_the_page_of_a_row_that_is_gone_leads_to_its_list_and_says_why(admin_client, name, view):
    answer = admin_client.get(page(name, view, "999999"), follow=True)
    assert answer.redirect_chain == [(page(name, "changelist"), 302)]
    text = answer.content.decode()
    assert " 999999: " in text
    assert GONE[name] in text


@pytest.mark.parametrize("query", ["", "verb=none&state=dead"])
def test_a_get_of_a_bulk_action_without_its_verb_leads_to_the_list(admin_client, query):
    answer = admin_client.get(f"{reverse(f'admin:{APP}_job_all')}?{query}", follow=True)
    assert answer.status_code == 200
    assert answer.redirect_chain[0][0].startswith(page("job", "changelist"))
    assert "Nothing done." in answer.content.decode()


def test_actions_have_their_own_urls_and_are_logged(user_client, rows):
    assert user_client.post(page("job", "act", MODELS["job"], "retry"), {"why": "because"}).status_code == 302
    assert Job.objects.get(pk=MODELS["job"]).state == "enqueued"
    assert LogEntry.objects.get().get_change_message() == "Retried: because"
    assert user_client.put(reverse(f"admin:{APP}_job_act", args=[MODELS["job"], "retry"])).status_code == 405
