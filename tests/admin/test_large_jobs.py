"""Test that pages read and show only a limited part of long texts; a download has the full text."""

import json

import pytest
from django.contrib import admin
from django.db import connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils.html import escape

from django_faktory.models import Batch, Job, OutboxEntry
from django_faktory.models.cron import CronEntry
from django_faktory.store import texts
from tests.factories import T0, JobFactory

pytestmark = [pytest.mark.once, pytest.mark.django_db]

MIB = 1024 * 1024
PAGE_BYTES = 200_000
HIDE_ALL = {"REDACT": "tests.project.redacting.hides_all"}
END = "the-very-end"


def page(model, *args, view="change"):
    return reverse(f"admin:django_faktory_{model}_{view}", args=args)


def job_text(size, jid="job-large-1", jobtype="noop"):
    """Return a job of about `size` characters, with brackets that take more space in HTML."""
    filler = "<&>.." * (size // 5)  # no quotes: MariaDB's driver doubles them, and a statement is limited to 16 MiB
    return json.dumps(
        {"jid": jid, "jobtype": jobtype, "args": [filler, [[[[END]]]]], "custom": {"kwargs": {"k": "<" * 99}}}
    )


def large_job(size=15 * MIB, **fields):
    attempt = {"wid": "w", "errtype": "E", "message": "<m>" * 9000, "backtrace": ["'line'" * 300] * 20}
    errors = [attempt | {"failed_at": "2026-05-01T12:00:00Z"}] * 50
    job = JobFactory(dead=True, jid="job-large-1", payload=job_text(size), **fields)
    texts_of = {"result": ["<r>" * (size // 4)], "failure": {"message": "<f>" * (size // 4)}, "history": errors}
    for column, value in texts_of.items():
        Job.objects.filter(pk=job.pk).update(**{column: json.dumps(value)})
    return Job.objects.get(pk=job.pk)


def whole(answer):
    return b"".join(answer.streaming_content).decode()


@pytest.mark.parametrize("size", [2 * MIB, 15 * MIB, texts.WHOLE // 4])
def test_the_page_of_a_large_job_stays_small_without_additional_queries(admin_client, size):
    small, large = JobFactory(dead=True, history="[]", failure="{}"), large_job(size)
    admin_client.get(page("job", small.pk))
    counts = []
    for job in (small, large):
        with CaptureQueriesContext(connection) as caught:
            answer = admin_client.get(page("job", job.pk))
        counts.append(len(caught))
    assert answer.status_code == 200
    assert len(answer.content) < PAGE_BYTES
    assert counts[1] == counts[0] <= 30
    assert "Only the beginning is shown" in answer.content.decode()


@pytest.mark.parametrize(
    ("column", "kind"),
    [("payload", "application/json"), ("result", "application/json"), ("history", "application/json")],
)
def test_a_full_text_can_be_downloaded(admin_client, column, kind):
    job = large_job(2 * MIB)
    assert page("job", job.pk, column, view="download") in admin_client.get(page("job", job.pk)).content.decode()
    answer = admin_client.get(page("job", job.pk, column, view="download"))
    assert answer.streaming
    assert answer.headers["Content-Type"] == kind
    assert answer.headers["Content-Disposition"] == f'attachment; filename="job-{job.pk}-{column}.json"'
    assert whole(answer) == getattr(job, column)


@pytest.mark.parametrize("size", [500, 2 * MIB])
def test_redacted_arguments_of_any_length_are_hidden_on_pages_and_downloads(admin_client, size):
    job = large_job(size)
    with override_settings(FAKTORY=HIDE_ALL):
        shown = admin_client.get(page("job", job.pk)).content.decode()
        sent = whole(admin_client.get(page("job", job.pk, "payload", view="download")))
    assert END not in sent + shown
    assert "&lt;&amp;" not in shown.partition("Result")[0]
    assert json.loads(sent)["args"] == "2 arguments of noop"
    assert ("[hidden]" if size > MIB else "2 arguments of noop") in shown


def test_a_download_is_a_get_of_a_long_text_of_a_row(admin_client):
    job = large_job(500)
    assert admin_client.post(page("job", job.pk, "payload", view="download")).status_code == 405
    for pk, column in [(job.pk, "jid"), (job.pk, "no-such"), ("0", "payload"), ("none", "payload"), ("%00", "payload")]:
        assert admin_client.get(page("job", pk, column, view="download")).status_code == 404


def test_long_arguments_cannot_be_edited_in_the_admin(admin_client):
    job = large_job(2 * MIB)
    address = reverse("admin:django_faktory_job_edit", args=[job.pk])
    for answer in (admin_client.get(address), admin_client.post(address, {"args": "[]", "kwargs": "{}"})):
        assert "too long to be edited" in answer.content.decode()
        assert len(answer.content) < PAGE_BYTES
    assert Job.objects.get().payload == job.payload


@pytest.mark.parametrize("model", ["job", "outboxentry", "batch", "cronentry"])
def test_a_list_loads_no_long_texts(admin_client, model):
    """The list loads no long text, and no row loads it later."""
    large_job(2 * MIB)
    text = job_text(2 * MIB)
    OutboxEntry.objects.create(jid="out-1", queue="mail", job=text, error="<e>" * MIB)
    Batch.objects.create(bid="b-1", description="<d>" * MIB, complete=text, success=text)
    CronEntry.objects.create(name="c", schedule="@daily", zone="UTC", jobtype="x", args=json.dumps([text]))
    with CaptureQueriesContext(connection) as caught:
        answer = admin_client.get(page(model, view="changelist"))
    assert answer.status_code == 200
    assert len(answer.content) < PAGE_BYTES
    [row] = answer.context["cl"].result_list
    long_texts = admin.site._registry[type(row)].long_texts
    read = {name: len(value) for name, value in row.__dict__.items() if isinstance(value, str)}
    assert sum(read.values()) < 20_000
    assert long_texts.keys() - read.keys() == row.get_deferred_fields() & long_texts.keys()
    assert len(caught) <= 20


def outbox_entry(size):
    inner = job_text(size, jobtype="shop.pay")
    row = {"jid": "job-large-1", "jobtype": "shop.pay", "text": inner}
    return OutboxEntry.objects.create(jid="out-1", queue="mail", job=json.dumps(row), error="<e>" * (size // 3))


def batch(size):
    return Batch.objects.create(
        bid="b-1", description="<d>" * (size // 3), complete=job_text(size), success=job_text(size)
    )


def cron_entry(size):
    args = json.dumps(["<" * size, END])
    return CronEntry.objects.create(name="c", schedule="@daily", zone="UTC", jobtype="x", args=args, next_at=T0)


@pytest.mark.parametrize(
    ("make", "columns"), [(outbox_entry, ["job"]), (batch, ["complete", "success"]), (cron_entry, ["args"])]
)
def test_pages_of_other_models_with_long_texts_are_small_too(admin_client, make, columns):
    row = make(2 * MIB)
    model = row._meta.model_name
    with CaptureQueriesContext(connection) as caught:
        answer = admin_client.get(page(model, row.pk))
    assert answer.status_code == 200
    assert len(answer.content) < PAGE_BYTES
    assert len(caught) <= 25
    for column in columns:
        address = page(model, row.pk, column, view="download")
        assert address in answer.content.decode()
        assert END in whole(admin_client.get(address))
        with override_settings(FAKTORY=HIDE_ALL):
            assert END not in whole(admin_client.get(address)) + admin_client.get(page(model, row.pk)).content.decode()


@pytest.mark.parametrize(
    "text", ["", "a", "<" * 99, "é" * 99, "\x1b" * 99, "🙂" * 99, '"&\'' * 33, "a<é🙂" * 30], ids=repr
)  # fmt: skip
def test_a_truncated_text_fits_the_limit_of_html_bytes(text):
    beginning = texts.cut(text, 50)
    assert text.startswith(beginning)
    assert len(escape(beginning).encode()) <= 50
    assert beginning == text or len(escape(text[: len(beginning) + 1]).encode()) > 50 or "\x1b" in text


def test_formatting_deeply_nested_json_is_bounded_in_size():
    deep = "[" * 120 + "]" * 120
    text = f"[{','.join([deep] * 4000)}]"
    assert len(texts.format_json(text)) < 2 * texts.SHOWN_BYTES
