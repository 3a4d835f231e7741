"""Hostile texts through the API: JSON is ASCII and keeps its meaning; HTML pages gain no element."""

from urllib.parse import quote

import pytest
from django.contrib.auth.models import User

from django_faktory.models import Batch, Job, JobLock, OutboxEntry, Queue, Tracking, WorkerProcess
from django_faktory.models.cron import CronEntry
from tests.hostile import HARMLESS, JOINED, asked, elements, fill

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.django_db]

JOINED_TEXTS = pytest.mark.parametrize("names", JOINED)


def addresses(text):
    """Return the address of each list and each detail, by name."""
    found = {
        name: f"/api/{name}/"
        for name in ("jobs", "queues", "workers", "batches", "cron", "locks", "statistics", "alarms")
    }
    names = {
        "jobs": Job.objects.order_by("pk").values_list("jid", flat=True)[:2],
        "workers": WorkerProcess.objects.values_list("wid", flat=True),
        "batches": Batch.objects.order_by("pk").values_list("bid", flat=True)[:1],
        "cron": CronEntry.objects.values_list("name", flat=True),
        "locks": map(str, JobLock.objects.values_list("pk", flat=True)),
    }
    for resource, keys in names.items():
        for place, key in enumerate(keys):
            if "/" in key or key in (".", ".."):
                continue  # not possible in a path; the list's filters find it
            found[f"{resource} {place}"] = f"/api/{resource}/{quote(key, safe='')}/"
            if resource == "batches":
                found |= {f"{more} {place}": f"/api/batches/{key}/{more}/" for more in ("members", "children", "tree")}
    for name in ("query", "task", "error", "queue", "about", "batch", "jid", "state", "cursor"):
        found[f"jobs by {name}"] = f"/api/jobs/?{asked(**{name: text})}"
    found["workers by hostname"] = f"/api/workers/?{asked(hostname=text, state=text, cursor=text)}"
    found["batches by stage"] = f"/api/batches/?{asked(stage=text, parent=text, description=text)}"
    found["cron by name"] = f"/api/cron/?{asked(name=text, state=text)}"
    found["locks by key"] = f"/api/locks/?{asked(key=text, jid=text, worker=text)}"
    found["jobs by address"] = f"/api/jobs/{quote(asked(q=text)[2:200])}/"
    return found


@pytest.mark.each_database
@JOINED_TEXTS
def test_responses_are_ascii_json_that_preserves_hostile_texts(client, settings, names):
    settings.FAKTORY = {"API_READS": ""}
    text = JOINED[names]
    fill(text)
    client.force_login(User.objects.create_superuser("root"))
    for place, address in addresses(text).items():
        answer = client.get(address)
        assert answer.status_code == 200 or (" by " in place and answer.status_code in (400, 404)), place
        assert answer.content.isascii(), place
        assert not any(byte < 32 for byte in answer.content), place
        answer.json()
    died = Job.objects.get(queue="died")
    [listed] = client.get("/api/jobs/?state=dead").json()["results"]
    assert listed["jid"] == died.jid
    if "/" not in died.jid:
        whole = client.get(f"/api/jobs/{quote(died.jid, safe='')}/").json()
        assert whole["job"]["args"] == [text, {text: text}]


_seen = {}


def pages(client, text):
    found = {}
    asked_for = {place: address for place, address in addresses(text).items() if " by " not in place}
    for place, address in asked_for.items():
        answer = client.get(address, headers={"Accept": "text/html"})
        assert answer.status_code < 500, place
        found[place] = elements(answer.content.decode(errors="strict"), is_ours=False)
    return found


@JOINED_TEXTS
def test_hostile_texts_add_no_element_to_browsable_pages(client, settings, names):
    settings.FAKTORY = {"API_READS": ""}
    client.force_login(User.objects.create_superuser("root"))
    if not _seen:
        fill(HARMLESS)
        _seen.update(pages(client, HARMLESS))
        for rows in (Job, Batch, WorkerProcess, CronEntry, JobLock, OutboxEntry, Queue, Tracking):
            rows.objects.all().delete()
    known = {element for before in _seen.values() for element in before}
    fill(JOINED[names])
    for place, there in pages(client, JOINED[names]).items():
        assert set(there) <= known | {("a", ("href", "rel"))}, place  # the framework turns URLs into links
        if place in _seen:
            assert without_links(there) == without_links(_seen[place]), place


def without_links(found):
    """Leave out links, because the framework turns URLs into them; `elements` has checked their targets."""
    return [element for element in found if element[0] not in ("a", "/a", "span", "/span")]
