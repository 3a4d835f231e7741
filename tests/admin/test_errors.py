"""Test dead jobs by error: groups, trying one job, retrying the others at a limited rate, and editing arguments."""

import re
from datetime import timedelta
from html import unescape
from itertools import pairwise

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from django_faktory.admin.jobs import bulk, error_groups
from django_faktory.admin.jobs.error_groups import ErrorKind
from django_faktory.models import Job
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db

TIMEOUT = '{"retry_count":1,"message":"order %d took 30 s","errtype":"net.Timeout"}'
KIND = ErrorKind("net.Timeout", "shop.send", "order N took N s")


def dead(number=1, **fields):
    fields = {"errtype": "net.Timeout", "jobtype": "shop.send", "failure": TIMEOUT % number, **fields}
    return JobFactory(dead=True, **fields)


def page(client, name, query="", *args):
    answer = client.get(f"{reverse(f'admin:django_faktory_job_{name}', args=args)}?{query}")
    assert answer.status_code == 200
    return answer.content.decode()


def words(text):
    return " ".join(unescape(re.sub("<[^>]*>", " ", text)).split())


def all_of(client, verb, query, **fields):
    """Start a bulk action and step through it; return the text of the last page and the number of pages."""
    answer = client.post(f"{reverse('admin:django_faktory_job_all')}?verb={verb}&{query}", fields)
    pages = 1
    while match := re.search(r'name="sweep" value="([^"]+)"', answer.content.decode()):
        answer = client.post(reverse("admin:django_faktory_job_all_step"), {"sweep": match[1]})
        pages += 1
    return words(answer.content.decode()), pages


def test_dead_jobs_with_the_same_error_are_grouped(admin_client):
    for number, fields in ((1, {}), (22, {}), (3, {"jobtype": "shop.other"})):
        dead(number, **fields)
    JobFactory(dead=True)
    JobFactory(retries=True)
    found = error_groups.group_jobs(Job.objects.dead())
    assert (found.groups[0].kind, found.groups[0].count) == (KIND, 2)
    assert (len(found.groups), found.jobs_read, found.is_more) == (3, 4, False)
    shown = words(page(admin_client, "errors"))
    assert "order N took N s" in shown
    assert "Killed manually" in shown


def test_error_groups_report_how_many_jobs_were_examined(admin_client, monkeypatch):
    [dead(number) for number in range(3)]
    found = error_groups.group_jobs(Job.objects.dead(), limit=2)
    assert (found.jobs_read, found.is_more, found.groups[0].count) == (2, True, 2)


def test_error_pages_take_few_queries_for_30_groups(admin_client, django_assert_max_num_queries):
    [dead(number, errtype=f"E{number}") for number in range(30)]
    page(admin_client, "errors")
    with django_assert_max_num_queries(4):
        page(admin_client, "errors")
    with django_assert_max_num_queries(6):
        page(admin_client, "error", KIND.query)


def test_trying_one_dead_job_shows_its_progress_and_outcome(admin_client):
    job, other = dead(1), dead(2)
    answer = admin_client.post(reverse("admin:django_faktory_job_try", args=[job.pk]), {"why": "deployed"}, follow=True)
    assert "it waits for a worker" in words(answer.content.decode())
    assert dict(Job.objects.values_list("pk", "state")) == {job.pk: "enqueued", other.pk: "dead"}
    assert LogEntry.objects.get().get_change_message() == "Retried, to see how it fares: deployed"
    query = f"{KIND.query}&tried={job.pk}"
    for state, outcome in (("working", "it runs"), ("succeeded", "it has succeeded"), ("dead", "it has failed again")):
        fields = {"started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T00:00:00Z"}
        fields |= {"reserved_until": "2036-01-01T00:00:00Z", "purge_at": "2036-01-01T00:00:00Z", "attempt": 1}
        Job.objects.filter(pk=job.pk).update(state=state, **fields)
        part = page(admin_client, "tried", query)
        assert outcome in words(part)
        assert ("data-faktory-ended" in part) is (state != "working")
    Job.objects.filter(pk=job.pk).delete()
    assert "has no row" in words(page(admin_client, "tried", query))


@pytest.mark.parametrize("tried", ["x", "", "9" * 30, "-1"])
def test_an_invalid_job_id_in_the_url_shows_nothing(admin_client, tried):
    assert words(page(admin_client, "tried", f"{KIND.query}&tried={tried}")) == ""


def test_a_job_that_is_no_longer_dead_is_not_tried(admin_client):
    job = JobFactory(succeeded=True)
    answer = admin_client.post(reverse("admin:django_faktory_job_try", args=[job.pk]), follow=True)
    assert "It is succeeded by now: nothing was done." in words(answer.content.decode())


def test_only_jobs_of_the_error_group_are_retried(admin_client):
    mine = [dead(number) for number in range(3)]
    others = [dead(1, failure='{"message":"something else"}'), dead(1, jobtype="shop.other"), JobFactory(dead=True)]
    shown, _ = all_of(admin_client, "retry", KIND.query, why="deployed")
    assert "Done. Retried: 3." in shown
    assert set(Job.objects.enqueued()) == set(mine)
    assert set(Job.objects.dead()) == set(others)
    assert [entry.get_change_message() for entry in LogEntry.objects.order_by("pk")] == [
        "Retry now: begun for all that match (3): deployed",
        "Retried 3 of all that match: deployed",
    ]
    assert "order N took N s" in LogEntry.objects.first().object_repr


def test_a_rate_limited_retry_spreads_jobs_over_time(admin_client):
    [dead(number) for number in range(3)]
    shown, _ = all_of(admin_client, "retry", KIND.query, per_minute="10")
    assert "They run one after the other" in shown
    times = list(Job.objects.retries().order_by("pk").values_list("run_at", flat=True))
    assert [later - sooner for sooner, later in pairwise(times)] == [timedelta(seconds=6)] * 2


@pytest.mark.parametrize("pace", ["nan", "-1", "x", "inf", "0"])
def test_an_invalid_retry_rate_means_an_immediate_retry(admin_client, pace):
    dead()
    all_of(admin_client, "retry", KIND.query, per_minute=pace)
    assert Job.objects.get().state == "enqueued"


def test_a_bulk_retry_runs_in_steps_and_ignores_jobs_that_die_later(admin_client, monkeypatch):
    monkeypatch.setattr(bulk, "CHUNK", 2)
    monkeypatch.setattr(bulk, "run_steps", lambda sweep, using: run_steps(sweep, using=using, max_work_s=0))
    [dead(number) for number in range(5)]
    first = admin_client.post(f"{reverse('admin:django_faktory_job_all')}?verb=retry&{KIND.query}").content.decode()
    later = dead(9)
    [sealed] = re.findall(r'name="sweep" value="([^"]+)"', first)
    step = reverse("admin:django_faktory_job_all_step")
    shown = admin_client.post(step, {"sweep": sealed}).content.decode()
    assert "Retried: 2 of 5." in words(shown)
    assert 'value="40"' in shown
    while match := re.search(r'name="sweep" value="([^"]+)"', shown):
        shown = admin_client.post(step, {"sweep": match[1]}).content.decode()
    assert list(Job.objects.dead()) == [later]


run_steps = bulk.run_steps


def test_a_capped_count_is_shown_with_a_plus_and_without_a_percentage(admin_client, monkeypatch):
    monkeypatch.setattr(bulk, "COUNTED", 2)
    [dead(number) for number in range(4)]
    assert "2+ job" in words(page(admin_client, "all", f"verb=retry&{KIND.query}"))
    begun = admin_client.post(f"{reverse('admin:django_faktory_job_all')}?verb=retry&{KIND.query}").content.decode()
    assert "<progress" in begun
    assert "value=" not in re.search("<progress[^>]*>", begun)[0]


def test_arguments_are_edited_before_a_retry(admin_client):
    job = dead(
        payload='{"jid":"a-job-12","jobtype":"shop.send","args":[1],"queue":"default","retry":25,"custom":{"kwargs":{"a":1}}}'
    )
    shown = page(admin_client, "edit", "", job.pk)
    assert "&quot;a&quot;: 1" in shown
    address = reverse("admin:django_faktory_job_edit", args=[job.pk])
    bad = admin_client.post(address, {"args": "[1", "kwargs": "{}"}).content.decode()
    assert "args: invalid JSON" in unescape(bad)
    assert ">[1</textarea>" in bad, "the rejected input stays in the form"
    admin_client.post(address, {"args": "[2]", "kwargs": "", "why": "typo"})
    assert (
        Job.objects.get().payload
        == '{"jid":"a-job-12","jobtype":"shop.send","args":[2],"queue":"default","retry":25,"custom":{"kwargs":{}}}'
    )
    assert LogEntry.objects.get().get_change_message() == "Edited its arguments: typo"


def test_a_running_job_cannot_be_edited(admin_client):
    job = JobFactory(working=True)
    address = reverse("admin:django_faktory_job_edit", args=[job.pk])
    assert "It is working" in admin_client.post(address, {"args": "[2]"}).content.decode()
    assert Job.objects.get().payload == job.payload
