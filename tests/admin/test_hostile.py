"""Test hostile texts in every field that a client can write: no page gains an element, runs a script or fails."""

from difflib import unified_diff

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.urls import reverse

from django_faktory.models import Batch, Job, JobLock, OutboxEntry, Queue, Tracking, WorkerProcess
from django_faktory.models.cron import CronEntry
from django_faktory.operations import error_groups
from tests.hostile import HARMLESS, JOINED, MEGABYTE, REFUSED, TEXTS, asked, elements, fill, hurry, unwelcome

pytestmark = [pytest.mark.django_db, pytest.mark.once]


def page(model, *args, view="change"):
    return reverse(f"admin:django_faktory_{model}_{view}", args=[quote(arg) for arg in args])


def addresses(text):
    """Return the address of every page of the admin with data, including addresses that contain the text."""
    jobs = page("job", view="changelist")
    found = {
        "index": "/admin/", "app": "/admin/django_faktory/", "overview": page("overview", view="changelist"),
        "part": reverse("admin:django_faktory_overview_part"), "jobs": jobs,
        "errors": reverse("admin:django_faktory_job_errors"),
    }  # fmt: skip
    for model in ("queue", "workerprocess", "batch", "cronentry", "joblock", "outboxentry"):
        found[f"{model}s"] = page(model, view="changelist")
    rows = [*Job.objects.filter(state__in=["dead", "working", "succeeded"]).order_by("pk")]
    rows += [Job.objects.filter(queue="members").first(), Batch.objects.latest("pk"), *WorkerProcess.objects.all()]
    rows += [*CronEntry.objects.all(), *JobLock.objects.all(), *OutboxEntry.objects.all()]
    for place, row in enumerate(rows):
        model = row._meta.model_name
        found[f"{model} {place}"] = page(model, row.pk)
        found[f"history of {model}"] = page(model, row.pk, view="history")
    for job in Job.objects.filter(state__in=["dead", "enqueued"]):
        found[f"edit {job.queue}"] = reverse("admin:django_faktory_job_edit", args=[job.pk])
    for name in ("q", "queue", "about", "bid", "state"):
        found[f"jobs by {name}"] = f"{jobs}?{asked(**{name: text})}"
    for verb in ("retry", "discard"):
        found[f"all {verb}"] = f"{reverse('admin:django_faktory_job_all')}?{asked(verb=verb, error=text, task=text)}"
    dead = Job.objects.get(state="dead")
    found["error"] = f"{reverse('admin:django_faktory_job_error')}?{error_groups.read_kind(dead).query}"
    found["tried"] = f"{reverse('admin:django_faktory_job_tried')}?{error_groups.read_kind(dead).query}&tried={dead.pk}"
    found["error by head"] = f"{reverse('admin:django_faktory_job_error')}?{asked(error=text, task=text, at=text)}"
    found["batches by q"] = f"{page('batch', view='changelist')}?{asked(q=text, stage=text)}"
    found["entries by q"] = f"{page('cronentry', view='changelist')}?{asked(q=text, state=text)}"
    return found


def seen(client, text):
    """Return the elements of each page, by the page's name."""
    hurry()
    found = {}
    for name, address in addresses(text).items():
        answer = client.get(address)
        assert answer.status_code in (200, 302), (name, answer.status_code)
        html = answer.content.decode()
        assert unwelcome(html) == [], (name, unwelcome(html))
        found[name] = elements(html)
    return found


def shape(found):
    return [f"{tag} {' '.join(names)}" for tag, names in found]


_seen = {}


def without_harm(client):
    """Return the elements of each page with a harmless text, computed once."""
    if not _seen:
        fill(HARMLESS)
        _seen.update(seen(client, HARMLESS))
        for rows in (Job, Batch, WorkerProcess, CronEntry, JobLock, OutboxEntry, LogEntry, Queue, Tracking):
            rows.objects.all().delete()
    return _seen


@pytest.mark.slow
@pytest.mark.parametrize("names", JOINED)
def test_hostile_texts_of_clients_add_no_element_to_a_page(admin_client, names):
    expected = without_harm(admin_client)
    fill(JOINED[names])
    found = seen(admin_client, JOINED[names])
    assert len(found) == len(expected)
    known = {element for before in expected.values() for element in before}
    for (is_now, there), (was, before) in zip(found.items(), expected.items(), strict=True):
        # The text may match other rows than the harmless one; arguments that are cut have no button that copies them.
        if " by " in was or names == "huge":
            assert set(there) <= known, was
        else:
            assert there == before, (was, is_now, "\n".join([*unified_diff(shape(before), shape(there), n=1)][:20]))


@pytest.mark.slow
def test_a_word_of_a_megabyte_adds_no_element_to_a_page(admin_client):
    fill(HARMLESS, argument=MEGABYTE)
    pages = seen(admin_client, HARMLESS)
    assert len(pages) > 40
    # Arguments of this length are edited as JSON, so the elements differ from those of the harmless text.
    assert [address for address, there in pages.items() if ("b", ()) in there] == []


@pytest.mark.parametrize("name", TEXTS)
def test_only_invalid_names_are_rejected_among_hostile_texts(db, name):
    expected = {place for place, refused in REFUSED.items() if name in refused}
    assert fill(TEXTS[name]) - {"cron entry"} == expected
