"""Test `REDACT`: no page, answer or log shows a hidden value, and if the function fails, all values are hidden."""

import json
import logging
import re
from contextlib import suppress

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.test import override_settings
from django.urls import NoReverseMatch, reverse

from django_faktory import Batch, task
from django_faktory.core.payloads import FetchRequest
from django_faktory.errors import InvalidArgument, InvalidQuery
from django_faktory.models import Job, OutboxEntry
from django_faktory.models.cron import CronEntry
from django_faktory.store import outbox
from django_faktory.store.jobs import claims, pushes
from django_faktory.store.store import Store
from django_faktory.tasks import redaction
from django_faktory.tasks.arguments import decode_call
from tests.factories import CronFactory, JobFactory, WorkerFactory, payload, staff_user
from tests.project import redacting
from tests.project.tasks import echo
from tests.waiting import wait_until

pytestmark = pytest.mark.once

MARKER = "m4rk3r-1n-args"
HIDE_ALL = {"REDACT": "tests.project.redacting.hides_all"}

hidden = override_settings(FAKTORY=HIDE_ALL)


@task(unique_for=600, lock=True, max_attempts=1, takes_context=True)
def stumbles(context, secret, *, also):
    """Fail with a message that does not quote the arguments."""
    raise ValueError("stumbled")


def text_with(args, kwargs=None):
    return payload(jobtype="noop", args=args, kwargs=kwargs).text


@pytest.fixture
def marked(transactional_db):
    """Create jobs in every state, a batch with callbacks and cron entries, all with the marker in their arguments."""
    found = []
    for trait in ("blocked", "scheduled", "working", "retries", "dead", "succeeded", "discarded", "expired", ""):
        text = text_with([MARKER], {"also": [MARKER]})
        jid = json.loads(text)["jid"]
        found.append(JobFactory(**{trait: True} if trait else {}, jid=jid, payload=text))
    with Batch(description="marked", success=echo.callback(MARKER), complete=echo.callback(x=MARKER)):
        echo.enqueue(MARKER, also=MARKER)
    stumbles.enqueue(MARKER, also=MARKER)
    also = f'{{"also":"{MARKER}"}}'
    CronFactory(name="marked", jobtype=echo.jobtype, origin="admin", args=f'["{MARKER}"]', kwargs=also)
    other = {"args": f'["{MARKER}"]', "job": f'{{"custom":{{"kwargs":{also}}}}}'}
    CronFactory(name="of another language", jobtype="elsewhere", **other)
    outbox.add([payload(jobtype="noop", args=[MARKER], kwargs={"also": MARKER})], using="default")
    OutboxEntry.objects.create(jid="job-broken-1", queue="mail", job=f'{{"text":"{MARKER}"', error="no room")
    return found


def pages_of_the_admin():
    yield reverse("admin:index")
    yield reverse("admin:app_list", args=["django_faktory"])
    for model, site in admin.site._registry.items():
        if model._meta.app_label == "django_faktory":
            names = [pattern.name for pattern in site.get_urls() if pattern.name]
            rows = [] if not hasattr(model, "objects") else list(_rows(model))
            download = f"admin:{model._meta.label_lower.replace('.', '_')}_download"
            yield from (reverse(download, args=[row.pk, column]) for row in rows for column in site.long_texts)
            for name in names:
                for args in [[], *([[row.pk] for row in rows])]:
                    yield from _reversed(f"admin:{name}", args)


def _rows(model):
    return model.objects.all() if model._meta.managed else []


def _reversed(name, args):
    with suppress(NoReverseMatch):  # a page that takes other arguments
        yield reverse(name, args=args)


def test_no_admin_page_shows_hidden_arguments(marked, admin_client):
    addresses = sorted(set(pages_of_the_admin()))
    assert sum("/job/" in address for address in addresses) > 20
    with hidden:
        shown = {address: text_of(admin_client.get(address, follow=True)) for address in addresses}
    assert [address for address, text in shown.items() if MARKER in text] == []
    assert "1 arguments of noop" in shown[reverse("admin:django_faktory_job_change", args=[marked[0].pk])]
    for model, expected in {
        "cronentry": "1 arguments of tests.project.tasks.echo",
        "outboxentry": "1 arguments of noop",
        "batch": "1 arguments of tests.project.tasks.echo",
        "job": "1 arguments of noop",
    }.items():
        pages = [text for address, text in shown.items() if f"/{model}/" in address and "/download/" not in address]
        sent = [text for address, text in shown.items() if f"/{model}/" in address and "/download/" in address]
        assert expected in "".join(pages), model
        assert expected in "".join(sent), model


def text_of(answer):
    """Return the whole body of a response, streamed or not."""
    return (b"".join(answer.streaming_content) if answer.streaming else answer.content).decode(errors="replace")


def addresses_of_the_api(client):
    """Yield each address that links and lists of the API lead to, with the body of its response."""
    found, seen = ["/api/"], set()
    while found:
        address = found.pop()
        if address in seen:
            continue
        seen.add(address)
        answer = client.get(address, headers={"accept": "application/json"})
        yield address, answer.content.decode()
        if "json" not in answer.headers.get("Content-Type", ""):
            continue
        data = answer.json()
        found += re.findall(r"http://testserver(/api/[^\"\s]*)", answer.content.decode())
        rows = data.get("results") if isinstance(data, dict) else None
        for row in rows or []:
            for key in ("jid", "bid", "name", "wid", "id", "token"):
                if isinstance(row, dict) and key in row:
                    found.append(f"{address.partition('?')[0]}{row[key]}/")


def test_no_api_response_shows_hidden_arguments(marked, admin_client):
    with hidden, override_settings(FAKTORY=HIDE_ALL | {"API_READS": "", "API_WRITES": ""}):
        bodies = dict(addresses_of_the_api(admin_client))
        job = f"/api/jobs/{marked[1].jid}/"
        edited = admin_client.patch(job, json.dumps({"priority": 7}), content_type="application/json")
        bodies["edited"] = edited.content.decode()
    assert edited.status_code == 200
    assert [address for address, text in bodies.items() if MARKER in text] == []
    assert json.loads(bodies[job])["job"]["args"] == "1 arguments of noop"
    assert any("cron" in address and "1 arguments of" in text for address, text in bodies.items())


COMMANDS = [
    ["info"], ["queues"], ["jobs"], ["jobs", "dead"], ["jobs", "--long"], ["workers"], ["batches"], ["cron"],
    ["cron", "list"], ["retry", "--dry-run", "dead"], ["kill", "--dry-run", "retries"], ["prune", "--dry-run"],
    ["top", "--once"],
]  # fmt: skip


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_no_command_output_shows_hidden_arguments(marked, faktory, extra):
    with hidden:
        results = [faktory(*words, *extra) for words in COMMANDS]
        results += [faktory("job", job.jid, *extra) for job in Job.objects.all()]
    text = "".join(one.out + one.err for one in results)
    assert MARKER not in text
    assert "1 arguments of noop" in text
    assert MARKER in faktory("job", marked[0].jid, *extra).out


@pytest.mark.parametrize("query", [f"text:{MARKER}", f'args:["{MARKER}"]', "dead text:m4"])
def test_hidden_arguments_cannot_be_searched_for(marked, admin_client, faktory, query):
    with hidden:
        page = admin_client.get(reverse("admin:django_faktory_job_changelist"), {"q": query}).content.decode()
        answer = admin_client.get("/api/jobs/", {"query": query})
        command = faktory("jobs", query)
    assert "hides them" in page
    assert marked[4].jid not in page
    assert answer.status_code == 400
    assert command.code != 0
    with hidden, pytest.raises(InvalidQuery):
        redaction.query_of(query)


def test_hidden_arguments_cannot_be_edited_in_the_admin(marked, admin_client):
    job = marked[1]
    address = reverse("admin:django_faktory_job_edit", args=[job.pk])
    with hidden:
        page = admin_client.post(address, {"args": "[]", "kwargs": "{}"})
    assert "cannot be edited on a page" in page.content.decode()
    assert Job.objects.get(pk=job.pk).payload == job.payload


def test_saving_a_cron_entry_keeps_its_hidden_arguments(marked, admin_client):
    entry = CronEntry.objects.get(name="marked")
    address = reverse("admin:django_faktory_cronentry_change", args=[entry.pk])
    fields = {
        name: getattr(entry, name)
        for name in ("name", "zone", "jobtype", "queue", "job", "missed", "window_s", "overlap")
    }
    with hidden:
        answer = admin_client.post(address, fields | {"schedule": "@hourly"})
    assert answer.status_code == 302, re.findall(r"errorlist.*", answer.content.decode())
    saved = CronEntry.objects.get(pk=entry.pk)
    assert (saved.schedule, saved.args, saved.kwargs) == ("@hourly", entry.args, entry.kwargs)


def cron_form(entry, **changes):
    names = ("name", "schedule", "zone", "jobtype", "queue", "args", "kwargs", "job", "missed", "window_s", "overlap")
    return {name: getattr(entry, name) for name in names} | changes


def test_changing_the_jobtype_of_a_cron_entry_reveals_no_hidden_arguments(marked, admin_client):
    """`REDACT` may depend on the jobtype: changing only the jobtype would reveal the hidden arguments."""
    entry = CronEntry.objects.get(name="marked")
    address = reverse("admin:django_faktory_cronentry_change", args=[entry.pk])
    with override_settings(FAKTORY={"REDACT": "tests.project.redacting.hides_echo"}):
        answer = admin_client.post(address, cron_form(entry, jobtype="elsewhere", args='["x"]'), follow=True)
        shown = text_of(admin_client.get(address))
    assert MARKER not in text_of(answer) + shown
    saved = CronEntry.objects.get(pk=entry.pk)
    assert (saved.jobtype, saved.args, saved.kwargs, saved.job) == (entry.jobtype, entry.args, entry.kwargs, entry.job)


@pytest.mark.parametrize("field", ["schedule", "missed", "name"])
def test_an_invalid_form_shows_no_hidden_arguments(marked, admin_client, field):
    entry = CronEntry.objects.get(name="marked")
    address = reverse("admin:django_faktory_cronentry_change", args=[entry.pk])
    with hidden:
        answer = admin_client.post(address, cron_form(entry, **{field: ""}))
    assert answer.status_code == 200
    assert "errorlist" in text_of(answer)
    assert MARKER not in text_of(answer)


@pytest.mark.slow
def test_admin_log_and_confirmation_pages_show_no_hidden_arguments(marked, admin_client):
    entry, outgoing = CronEntry.objects.get(name="marked"), OutboxEntry.objects.first()
    responses = []
    with hidden:
        for model, row in (("cronentry", entry), ("outboxentry", outgoing)):
            one = reverse(f"admin:django_faktory_{model}_delete", args=[row.pk])
            responses += [admin_client.get(one), admin_client.post(one, {"post": "yes"}, follow=True)]
        everything = reverse("admin:django_faktory_outboxentry_changelist")
        chosen = {"_selected_action": [row.pk for row in OutboxEntry.objects.all()]}
        responses += [
            admin_client.post(everything, {"action": name, **chosen}) for name in ("delete_selected", "try_again")
        ]
        for job in Job.objects.all():
            for verb in ("retry", "cancel", "kill", "discard"):
                act = reverse("admin:django_faktory_job_act", args=[job.pk, verb])
                responses += [admin_client.post(act, post, follow=True) for post in ({}, {"confirmed": "yes"})]
        responses += [admin_client.get(reverse("admin:index"))]
    assert [answer.request["PATH_INFO"] for answer in responses if MARKER in text_of(answer)] == []
    log_text = "".join(f"{one} {one.object_repr} {one.change_message}" for one in LogEntry.objects.all())
    assert LogEntry.objects.count() > 5
    assert MARKER not in log_text


def test_an_error_message_of_a_cron_entry_quotes_no_hidden_arguments(marked, admin_client):
    """The task takes none of the entry's options, so the message names them."""
    entry = CronEntry.objects.get(name="of another language")
    CronEntry.objects.filter(pk=entry.pk).update(jobtype="tests.project.tasks.echo")
    entry.refresh_from_db()
    address = reverse("admin:django_faktory_cronentry_change", args=[entry.pk])
    assert MARKER in text_of(admin_client.post(address, cron_form(entry)))
    with hidden:
        answer = admin_client.post(address, cron_form(entry))
    assert "errorlist" in text_of(answer)
    assert MARKER not in text_of(answer)


def test_the_overview_shows_only_numbers_to_users_with_statistics_permission(client, transactional_db):
    failure = f'{{"message":"quoted {MARKER}"}}'
    JobFactory(dead=True, errtype="shop.Declined", failure=failure, jobtype="shop.pay")
    JobFactory(working=True, jobtype="shop.runs", wid="worker-7")
    WorkerFactory(wid="worker-7", hostname="host-of-worker-7")
    addresses = [reverse("admin:django_faktory_overview_changelist"), reverse("admin:django_faktory_overview_part")]
    words = ["quoted", "shop.Declined", "shop.pay", "shop.runs", "host-of-worker-7"]
    client.force_login(staff_user("view_statistics"))
    for address in addresses:
        text = text_of(client.get(address))
        assert [word for word in words if word in text] == []
        assert "<strong>1</strong> dead" in text
    client.force_login(staff_user("view_statistics", "view_job", "view_workerprocess"))
    assert [word for word in words if word not in text_of(client.get(addresses[1]))] == []


def test_logs_and_recorded_failures_show_no_hidden_arguments(work, state, caplog):
    bad = {"$type": "decimal", "value": MARKER}
    gone = {"$model": "shop.order", "pk": MARKER}
    all_fail = override_settings(FAKTORY=HIDE_ALL | {"UNKNOWN_JOBTYPE_GRACE": 0})
    with all_fail, caplog.at_level(logging.DEBUG):
        results = [stumbles.enqueue(MARKER, also=MARKER)]
        others = [payload(jobtype="tests.project.tasks.fails_for_good", args=[one], retry=0) for one in (bad, gone)]
        pushes.push(Store(), [*others, payload(jobtype="unknown", args=[MARKER], retry=0)])
        work(broker=None)
        state(results[0], "dead")
        wait_until(lambda: not Job.objects.filter(state__in=("enqueued", "working")).exists())
        recorded = [
            redaction.redact_job(job.jobtype, job.payload) + job.history + job.failure for job in Job.objects.all()
        ]
    assert "stumbled" in caplog.text
    assert MARKER not in caplog.text
    assert MARKER not in "".join(recorded)


def test_reprs_show_no_hidden_arguments(transactional_db):
    with hidden:
        result = echo.enqueue(MARKER, also=MARKER)
        again = echo.get_result(result.id)
        [[held]] = claims.fetch(Store(), [FetchRequest(queues=("default",), wid="w")])
        made = payload(args=[MARKER])
        row = Job.objects.get(jid=result.id)
        reprs = repr([result, again, held, made, row, str(row)])
    assert MARKER not in reprs
    assert result.id in reprs
    assert MARKER in repr(echo.get_result(result.id))


def test_workers_receive_arguments_without_redaction(transactional_db):
    with hidden:
        echo.enqueue(MARKER)
        [[held]] = claims.fetch(Store(), [FetchRequest(queues=("default",), wid="w")])
    assert MARKER in held.wire()


def test_the_function_is_called_separately_for_args_and_kwargs():
    redacting.SEEN.clear()
    with hidden:
        redaction.redact_job("noop", text_with([1, 2], {"card": 3}))
    assert redacting.SEEN == [("noop", [1, 2]), ("noop", {"card": 3})]


def test_redacted_arguments_are_shown_and_other_job_fields_stay_verbatim():
    text = '{"jid":"jid-jid-1","big":1.0e5,"args":[12345678901234567890],"custom":{"kwargs":{"card":"1","n":1.0}}}'
    with override_settings(FAKTORY={"REDACT": "tests.project.redacting.hides_cards"}):
        shown = redaction.redact_job("noop", text)
    assert '"big":1.0e5' in shown
    assert json.loads(shown)["args"] == [12345678901234567890]
    assert json.loads(shown)["custom"]["kwargs"] == {"card": "****", "n": 1.0}


@pytest.mark.parametrize("name", ["fails", "returns_no_json", "no_such_function"])
def test_a_failing_function_hides_all_arguments_and_is_logged_once(name, caplog):
    redaction._failed.clear()
    with override_settings(FAKTORY={"REDACT": f"tests.project.redacting.{name}"}):
        shown = [redaction.redact_arguments("noop", [MARKER]) for _ in range(3)]
        job = redaction.redact_job("noop", text_with([MARKER], {"x": MARKER}))
    assert shown == [redaction.HIDDEN] * 3
    assert MARKER not in job
    [record] = [record for record in caplog.records if record.name == "django_faktory.tasks.redaction"]
    assert "REDACT failed" in record.getMessage()
    assert MARKER not in caplog.text


@pytest.mark.parametrize("text", ["no job", '{"args":[', "[]"])
def test_text_that_is_not_a_job_is_hidden_completely(text):
    with hidden:
        assert redaction.redact_job("noop", text) == f'"{redaction.HIDDEN}"'


def test_the_function_cannot_change_the_arguments_of_the_job(transactional_db):
    with override_settings(FAKTORY={"REDACT": "tests.project.redacting.empties"}):
        result = echo.enqueue(MARKER)
        assert redaction.redact_arguments(echo.jobtype, result.args) == []
    assert result.args == [MARKER]


def test_without_the_setting_arguments_are_shown_and_quoted_in_errors():
    assert redaction.redact_arguments("noop", [MARKER]) == [MARKER]
    with pytest.raises(InvalidArgument, match=MARKER):
        decode_call([{"$type": "decimal", "value": MARKER}], {})


def test_the_api_refuses_a_jobtype_change_that_keeps_hidden_arguments(marked, admin_client):
    """`REDACT` may hide nothing for the new jobtype, which would reveal the arguments."""
    with hidden:
        ask = {"path": "/api/cron/marked/", "content_type": "application/json"}
        refused = admin_client.patch(data=json.dumps({"jobtype": "elsewhere", "kwargs": {}}), **ask)
        taken = admin_client.patch(data=json.dumps({"jobtype": "elsewhere", "args": [1], "kwargs": {}}), **ask)
    assert (refused.status_code, taken.status_code) == (409, 200)
    assert "args" in refused.json()["detail"]
    assert MARKER not in refused.content.decode()
