"""Test that a POST to a read-only page writes nothing; actions have addresses of their own."""

import pytest
from django.urls import reverse

from django_faktory.models import Batch, Job, JobLock, Limit, OutboxEntry, Queue, WorkerProcess
from django_faktory.models.cron import CronEntry
from tests.security.matrix.asking import stored
from tests.security.matrix.routes import APP, ROWS
from tests.security.matrix.rows import plant

pytestmark = [pytest.mark.django_db, pytest.mark.once]

ONLY_SHOWN = {
    "overview": Queue, "job": Job, "queue": Queue, "workerprocess": WorkerProcess, "batch": Batch, "joblock": JobLock,
    "outboxentry": OutboxEntry, "gearmonkeyfunction": Queue,
}  # fmt: skip


@pytest.fixture
def rows(db):
    plant()


def page(model, view, *args):
    return reverse(f"admin:{APP}_{model}_{view}", args=args)


def form_of(row):
    """Return every column in the format that a Django form posts."""
    return {field.name: "" if (value := field.value_from_object(row)) is None else value for field in row._meta.fields}


@pytest.mark.parametrize("name", ONLY_SHOWN)
def test_a_post_to_a_read_only_page_writes_nothing(admin_client, rows, name):
    row = ONLY_SHOWN[name].objects.get(pk=ROWS[name])
    before = stored()
    for button in ({}, {"_save": "1"}, {"_continue": "1"}, {"_saveasnew": "1"}, {"_popup": "1"}):
        answer = admin_client.post(page(name, "change", row.pk), form_of(row) | button)
        assert answer.status_code == 405, button
        assert stored() == before, button
    for method in (admin_client.put, admin_client.patch, admin_client.delete):
        assert method(page(name, "change", row.pk)).status_code == 405
    assert stored() == before


@pytest.mark.parametrize("name", ROWS)
def test_posts_without_a_valid_action_to_list_and_history_write_nothing(admin_client, rows, name):
    pk = ROWS[name]
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
        admin_client.post(page(name, "changelist"), post)
        assert stored() == before, post
    assert admin_client.post(page(name, "history", pk), {"_save": "1"}).status_code == 405
    assert stored() == before


@pytest.mark.parametrize(("name", "model"), [("cronentry", CronEntry), ("limit", Limit)])
def test_cron_entries_and_limits_cannot_be_copied_by_save_as_new(admin_client, rows, name, model):
    form = form_of(model.objects.get(pk=ROWS[name])) | {"name": "a copy", "_saveasnew": "1"}
    before = stored()
    assert admin_client.post(page(name, "change", ROWS[name]), form).status_code == 403
    assert stored() == before


@pytest.mark.parametrize("name", ["cronentry", "limit"])
@pytest.mark.parametrize("pk", ["0", "none", "99999999999999999999", "a/b"])
def test_an_action_on_a_missing_row_leads_to_the_list(admin_client, name, pk):
    answer = admin_client.post(page(name, "act", pk, "pause"), follow=True)
    assert answer.redirect_chain == [(page(name, "changelist"), 302)]
    assert "no longer exists." in answer.content.decode()


@pytest.mark.parametrize("name", ["cronentry", "limit"])
def test_an_action_requires_post_and_a_known_verb(admin_client, rows, name):
    assert admin_client.put(page(name, "act", ROWS[name], "pause")).status_code == 405
    assert admin_client.post(page(name, "act", ROWS[name], "explode")).status_code == 403


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
