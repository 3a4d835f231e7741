"""Test the table of a job's arguments: names from the task's signature, redaction, limits, hostile texts."""

import json

import pytest
from django.test import override_settings
from django.urls import reverse

from django_faktory import task
from tests.factories import JobFactory, payload
from tests.hostile import JOINED, TEXTS, elements, unwelcome
from tests.project.tasks import add, echo

pytestmark = [pytest.mark.once, pytest.mark.django_db]


@task(takes_context=True)
def deliver(context, order, /, address, *parcels, express=False, **options):
    """A task with each kind of parameter."""


def job_of(task_, *args, **kwargs):
    text = payload(jobtype=task_.jobtype, args=args, kwargs=kwargs).text
    return JobFactory(jobtype=task_.jobtype, payload=text, jid=json.loads(text)["jid"])


def shown(client, job):
    return client.get(reverse("admin:django_faktory_job_change", args=[job.pk]))


def table(client, job):
    return [(name, text) for name, text, _ in shown(client, job).context["arguments"]]


def test_arguments_are_shown_with_the_names_of_the_parameters(admin_client):
    job = job_of(deliver, 7, "Street 1", "a", "b", express=True, colour="red")
    assert table(admin_client, job) == [
        ("order", "7"), ("address", '"Street 1"'), ("*parcels", '"a"'), ("*parcels", '"b"'), ("express", "true"),
        ("colour", '"red"'),
    ]  # fmt: skip
    page = shown(admin_client, job).content.decode()
    assert '<th scope="row"><bdi>address</bdi></th>' in page
    assert "As JSON" in page


def test_references_are_shown_as_their_values(admin_client):
    half = {"$type": "time", "value": "\ud83d"}
    job = job_of(
        echo, {"$type": "decimal", "value": "1.20"}, {"$model": "shop.order", "pk": 7}, {"$type": "date"}, half
    )
    assert [text for _, text in table(admin_client, job)] == [
        "1.20 (decimal)", "shop.order 7", '{\n  "$type": "date"\n}', "\ufffd (time)",
    ]  # fmt: skip


def test_a_keyword_argument_is_shown_at_its_parameter(admin_client):
    assert table(admin_client, job_of(add, b=2, a=1)) == [("a", "1"), ("b", "2")]


@pytest.mark.parametrize("args", [[], [1], [1, 2, 3]])
def test_arguments_that_the_task_cannot_take_are_shown_as_json(admin_client, args):
    job = job_of(add, *args)
    assert table(admin_client, job) == []
    assert "As JSON" not in shown(admin_client, job).content.decode()


def test_arguments_of_an_unknown_task_are_shown_as_json(admin_client):
    job = JobFactory(jobtype="elsewhere", payload='{"args":[1,"word"]}')
    assert table(admin_client, job) == []
    assert "&quot;word&quot;" in shown(admin_client, job).content.decode()


def test_encrypted_arguments_get_no_names(admin_client):
    job = job_of(echo, {"$encrypted": "gAAAA" + "x" * 200})
    assert table(admin_client, job) == []


def test_hidden_values_are_hidden_in_the_table(admin_client):
    job = job_of(echo, 1, card="4242")
    with override_settings(FAKTORY={"REDACT": "tests.project.redacting.hides_cards"}):
        assert table(admin_client, job) == [("*args", "1"), ("card", '"****"')]
        assert "4242" not in shown(admin_client, job).content.decode()


@pytest.mark.parametrize("function", ["hides_all", "fails", "empties", "returns_no_json", "hides_echo"])
def test_arguments_that_are_hidden_whole_get_no_names(admin_client, function):
    job = job_of(echo, "m4rk3r", also="m4rk3r")
    with override_settings(FAKTORY={"REDACT": f"tests.project.redacting.{function}"}):
        assert table(admin_client, job) == []
        assert "m4rk3r" not in shown(admin_client, job).content.decode()


def test_a_removed_value_does_not_move_names_to_other_values(admin_client, monkeypatch):
    job = job_of(add, "secret", "open")
    with override_settings(FAKTORY={"REDACT": lambda jobtype, arguments: arguments[1:]}):
        assert table(admin_client, job) == []


def test_many_and_long_arguments_are_cut(admin_client):
    job = job_of(echo, *["x" * 100_000] * 5, *range(200))
    rows = shown(admin_client, job).context["arguments"]
    assert len(rows) == 50
    assert all(row.is_cut for row in rows[:5])
    page = shown(admin_client, job_of(echo, *["<" * 10_000] * 60)).content
    assert len(page) < 150_000


@pytest.mark.parametrize("hostile", JOINED.values(), ids=JOINED)
def test_hostile_arguments_add_no_element_to_the_table(admin_client, hostile):
    def page_with(text):
        job = job_of(echo, text, {text: text}, **{text: [text], "other": 1})
        answer = shown(admin_client, job)
        assert answer.context["arguments"]
        html = answer.content.decode()
        assert unwelcome(html) == []
        return elements(html)

    assert page_with(hostile) == page_with("harmless" if len(hostile) < 1000 else "W" * len(hostile))


def test_tasks_that_cannot_be_imported_do_not_break_the_page(admin_client, broken_app, caplog):
    from django_faktory.operations import signatures

    broken_app("import no_such_thing\n")
    signatures._import_tasks.cache_clear()
    job = JobFactory(jobtype="elsewhere")
    assert table(admin_client, job) == []
    assert table(admin_client, job) == []
    assert caplog.text.count("tasks cannot be imported") == 1
    signatures._import_tasks.cache_clear()


# --- copy buttons, and the link to a trace

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACES = {"TRACE_URL": "https://traces.example.org/trace/{trace_id}?tab=1&x=2"}


def test_texts_that_are_shown_whole_have_a_button_that_copies_them(admin_client):
    page = shown(admin_client, job_of(add, 1, b=2)).content.decode()
    for name in ("faktory-jid", "faktory-args", "faktory-kwargs"):
        assert f'id="{name}"' in page
        assert f'<button type="button" name="copy" value="{name}"' in page
    assert page.count('name="copy"') == page.count("hidden>Copy</button>") == 3, "hidden without the script"
    long = shown(admin_client, job_of(add, "x" * 100_000, 2)).content.decode()
    assert 'value="faktory-args"' not in long


def test_a_job_with_a_trace_context_links_to_its_trace(admin_client):
    job = JobFactory(payload=json.dumps({"args": [], "custom": {"traceparent": PARENT}}))
    assert "Trace" not in dict(shown(admin_client, job).context["facts"])
    with override_settings(FAKTORY=TRACES):
        page = shown(admin_client, job).content.decode()
    link = "https://traces.example.org/trace/0af7651916cd43dd8448eb211c80319c?tab=1&amp;x=2"
    assert f'<a href="{link}" rel="noreferrer">0af7651916cd43dd8448eb211c80319c</a>' in page


@pytest.mark.parametrize(
    "value",
    [
        *TEXTS.values(), 7, None, [], {}, "", PARENT.upper(), f"{PARENT} ", PARENT.replace("0af7", "javascript:"),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
    ],
)  # fmt: skip
def test_a_malformed_trace_context_is_no_link(admin_client, value):
    job = JobFactory(payload=json.dumps({"args": [], "custom": {"traceparent": value}}))
    with override_settings(FAKTORY=TRACES):
        answer = shown(admin_client, job)
    assert "Trace" not in dict(answer.context["facts"])
    assert "traces.example.org" not in answer.content.decode()
