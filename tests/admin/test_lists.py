"""Lists of jobs show arguments and messages: shortened, escaped, redacted, and without reading long texts."""

import json

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from tests.admin.pages import words
from tests.factories import JobFactory

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]

HOSTILE = "<script>alert(1)</script>"


def failed(args, *, kwargs=None, message="no answer", **fields):
    payload = json.dumps({"args": args, "custom": {"kwargs": kwargs or {}}}, separators=(",", ":"))
    failure = json.dumps({"message": message, "errtype": "shop.Timeout"}, separators=(",", ":"))
    return JobFactory(
        dead=True, errtype="shop.Timeout", jobtype="shop.send", payload=payload, failure=failure, **fields
    )


def pages(client):
    """Return the list of dead jobs, and the page of their error."""
    place = "error=shop.Timeout&task=shop.send&at=no+answer"
    for address in (
        f"{reverse('admin:django_faktory_job_changelist')}?state=dead",
        f"{reverse('admin:django_faktory_job_error')}?{place}",
    ):
        answer = client.get(address)
        assert answer.status_code == 200
        yield answer.content.decode()


def test_lists_show_arguments_and_messages(admin_client):
    failed([4711, "anna@example.org"], kwargs={"copies": 2})
    for page in pages(admin_client):
        assert '[4711, "anna@example.org"] {"copies": 2}' in words(page)
        assert "no answer" in words(page)


def test_arguments_and_messages_in_lists_are_escaped_and_shortened(admin_client):
    failed([HOSTILE, "x" * 500])
    for page in pages(admin_client):
        assert HOSTILE not in page
        assert HOSTILE in words(page.replace("&lt;script&gt;", "&lt;script&gt;"))
        assert "x" * 60 in page
        assert "x" * 120 not in page


def test_lists_show_redacted_arguments(admin_client, settings):
    settings.FAKTORY = {**settings.FAKTORY, "REDACT": lambda jobtype, args: ["***"] if isinstance(args, list) else args}
    failed(["secret"])
    failed(["secret" * 1000])
    for page in pages(admin_client):
        assert "secret" not in page
        assert '["***"]' in words(page)
        assert "(too long)" in words(page)


def test_lists_show_the_beginning_of_long_arguments_and_read_no_more(admin_client):
    failed([4711, "y" * 100_000])
    with CaptureQueriesContext(connection) as captured:
        for page in pages(admin_client):
            assert '[4711,"yyyy' in words(page)
    whole = [one["sql"] for one in captured if '"django_faktory_job"."payload",' in one["sql"].replace("`", '"')]
    assert [sql for sql in whole if "SUBSTR" not in sql.upper()] == []
