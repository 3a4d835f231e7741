"""Search jobs by words, as people type them, on pages, in the API and on the command line: what is found, how far."""

import json
import re
from html import unescape
from urllib.parse import urlencode

import pytest
from django.urls import reverse
from django.utils import timezone

from django_faktory.models import Job
from tests.admin.pages import words
from tests.admin.test_jobs import JOBS, found, make_mails_of_which_two_are_recent
from tests.factories import JobFactory, QueueFactory

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]


@pytest.fixture
def orders(db):
    """A job of order 4711, one with the number in its jid only, and one whose failure mentions the order."""
    others = {"jobtype": "noop", "created_at": timezone.now()}
    end = '"created_at":"2026-11-28T20:18:53.471104Z"}'
    text = '{"jid":"%s","jobtype":"%s","args":%s,' + end
    args = '[4711,{"mail":"anna@example.org","name":"M\\u00fcller"}]'
    JobFactory(jid="job-of-it", payload=text % ("job-of-it", "shop.ship_order", args), **others)
    JobFactory(jid="other-4711", payload=text % ("other-4711", "noop", "[1]"), **others)
    failure = '{"message":"no stock for order 4711"}'
    JobFactory(jid="failed-for-it", dead=True, failure=failure, payload=text % ("x", "noop", "[]"), **others)


@pytest.mark.parametrize(
    ("text", "jids"),
    [
        ("4711", {"job-of-it", "failed-for-it"}),
        ("order 4711", {"job-of-it", "failed-for-it"}),
        ('"order 4711"', {"failed-for-it"}),
        ("anna@example.org", {"job-of-it"}),
        ("Müller", {"job-of-it"}),
        ("dead 4711", {"failed-for-it"}),
        ("job-of-it 4711", {"job-of-it"}),
        ("4712", set()),
    ],
)
@pytest.mark.usefixtures("orders")
def test_words_are_searched_in_arguments_and_messages(admin_client, as_root, faktory, text, jids):
    jobs, shown = found(admin_client, text)
    assert {job.jid for job in jobs} == jids
    assert "jobs were searched." in shown
    assert {job["jid"] for job in as_root("GET", "jobs/", query=text).data["results"]} == jids
    listed = json.loads(faktory("jobs", text, "--json").out)
    assert {job["jid"] for job in listed["jobs"]} == jids or '"' in text, "a shell removes the quotes"


@pytest.mark.parametrize("text", ["4711 among:1", "text:4711 among:1", "word:4711 among:1"])
@pytest.mark.usefixtures("orders")
def test_a_search_of_a_part_says_how_far_it_looked_and_offers_more(admin_client, as_root, faktory, text):
    jobs, shown = found(admin_client, text)
    assert [job.jid for job in jobs] == ["failed-for-it"]
    assert "The newest 1 of 3 jobs were searched: search 10 , search failed jobs only ." in shown
    page = admin_client.get(f"{reverse(JOBS)}?{urlencode({'q': text})}").content.decode()
    wider = re.search(r'href="([^"]+)">search 10<', page)
    assert "All 3 jobs were searched." in words(admin_client.get(unescape(wider[1])).content.decode())
    assert as_root("GET", "jobs/", query=text).data["searched"] == {"jobs": 1, "of": 3, "is_more": False}
    assert "searched the newest 1 of 3 jobs; add among:10 to search more" in faktory("jobs", text).err


def test_a_list_of_recent_jobs_says_how_far_it_looked(admin_client, as_root):
    make_mails_of_which_two_are_recent()
    _, shown = found(admin_client, "task:shop.tasks.mail")
    assert "The newest 2 of 3 jobs were searched: search 500,000" in shown
    assert len(found(admin_client, "task:shop.tasks.mail among:500000")[0]) == 3
    assert as_root("GET", "jobs/", task="shop.tasks.mail").data["searched"]["jobs"] == 2
    assert as_root("GET", "jobs/").data["searched"] is None


@pytest.mark.usefixtures("orders")
def test_the_page_says_how_it_read_a_word(admin_client):
    QueueFactory(name="4711")
    _, shown = found(admin_client, "4711")
    assert "Searched for queue:4711 ( search arguments and messages instead )" in shown


@pytest.mark.usefixtures("orders")
def test_words_without_a_match_are_offered_one_by_one(admin_client):
    _, shown = found(admin_client, "parcel 4711")
    assert "Search for one of them: parcel , 4711" in shown


@pytest.mark.usefixtures("orders")
def test_hidden_arguments_are_not_searched_for_words(admin_client, settings):
    settings.FAKTORY = {**settings.FAKTORY, "REDACT": lambda jobtype, args: args}
    jobs, shown = found(admin_client, "4711")
    assert {job.jid for job in jobs} == {"failed-for-it"}
    assert "Arguments are hidden, and were not searched." in shown


@pytest.mark.parametrize("verb", ["discard", "retry"])
@pytest.mark.usefixtures("orders")
def test_a_verb_takes_no_words(faktory, as_root, verb):
    states = dict(Job.objects.values_list("jid", "state"))
    assert faktory(verb, "4711").code == 1
    assert as_root("POST", f"jobs/bulk/{verb}/", {"query": "4711"}).status == 400
    assert dict(Job.objects.values_list("jid", "state")) == states
