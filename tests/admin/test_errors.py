"""Test dead jobs by error: groups, trying one job, retrying the others at a limited rate, and editing arguments."""

import json
import re
from datetime import timedelta
from html import unescape

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.urls import reverse
from django.utils import timezone

from django_faktory.admin.jobs.bulk_views import COUNTED, count_jobs
from django_faktory.admin.jobs.changelist import JobAdmin
from django_faktory.admin.lists import format_capped
from django_faktory.models import Job
from django_faktory.operations import bulk, error_groups
from django_faktory.operations.error_groups import FailureKind
from tests.admin.pages import words
from tests.factories import T0, JobFactory, end_all

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]

TIMEOUT = '{"retry_count":1,"message":"order %d took 30 s","errtype":"net.Timeout"}'
KIND = FailureKind("net.Timeout", "shop.send", "order N took N s")


def dead(number=1, **fields):
    fields = {"errtype": "net.Timeout", "jobtype": "shop.send", "failure": TIMEOUT % number, **fields}
    return JobFactory(dead=True, **fields)


def page(client, name, query="", *args):
    answer = client.get(f"{reverse(f'admin:django_faktory_job_{name}', args=args)}?{query}")
    assert answer.status_code == 200
    return answer.content.decode()


def all_of(client, verb, query, **fields):
    """Start a bulk action and step through it; return the text of the last page and the number of pages."""
    answer = client.post(f"{reverse('admin:django_faktory_job_all')}?verb={verb}&{query}", fields)
    pages = 1
    while match := re.search(r'name="run" value="([^"]+)"', answer.content.decode()):
        answer = client.post(reverse("admin:django_faktory_job_all_step"), {"run": match[1]})
        pages += 1
    return words(answer.content.decode()), pages


def test_dead_jobs_with_the_same_error_are_grouped(admin_client):
    for number, fields in ((1, {}), (22, {}), (3, {"jobtype": "shop.other"})):
        dead(number, **fields)
    JobFactory(dead=True)
    JobFactory(retries=True)
    found = error_groups.group_failed(using="default")
    assert (found.groups[0].kind, found.groups[0].count) == (KIND, 2)
    assert (len(found.groups), found.jobs_read, found.is_more) == (3, 5, False)
    shown = words(page(admin_client, "errors"))
    assert "order 22 took 30 s" in shown
    assert "Killed manually" in shown


TRACEBACK = """{"retry_count":0,"message":%s,"errtype":"E","backtrace":["Traceback (most recent call last):",
"  File \\"/srv/app/shop/tasks.py\\", line %d, in charge", "    client.pay(card)",
"  File \\"/srv/venv/lib/python3.11/site-packages/stripe/http.py\\", line 99, in pay", "E: no"]}"""


def test_jobs_are_grouped_by_the_place_in_the_projects_code_and_not_by_the_message(admin_client):
    messages = ["Your card was declined. request_id=req_8fKq2", "Your card was declined. request_id=req_Hv1x", "other"]
    for line, message in enumerate(messages):
        dead(errtype="E", failure=TRACEBACK % (json.dumps(message), line))
    [group] = error_groups.group_failed(using="default").groups
    assert (group.count, group.kind) == (3, FailureKind("E", "shop.send", "charge (shop/tasks.py)"))
    shown = words(page(admin_client, "error", group.kind.query))
    assert "charge (shop/tasks.py)" in shown
    assert "client.pay(card)" in shown, "the traceback of the latest job is on the page"


def test_the_page_of_a_group_names_the_releases_of_its_jobs(admin_client):
    def failed_in(*releases):
        history = [{"errtype": "E", "message": '"release":"no"}]', "backtrace": [], "release": it} for it in releases]
        dead(errtype="E", failure='{"message":"no"}', history=json.dumps(history, separators=(",", ":")))

    dead(errtype="E", failure='{"message":"no"}', history='[{"errtype":"E","message":"x","backtrace":[]}]')
    [group] = error_groups.group_failed(using="default").groups
    assert "Releases" not in words(page(admin_client, "error", group.kind.query))
    for releases in (["2.3"], ["2.3", 'ü"\u0000'], ["2.3"]):
        failed_in(*releases)
    shown = words(page(admin_client, "error", group.kind.query))
    assert 'Releases 2.3, ü"\ufffd ' in shown


def test_a_backtrace_of_another_language_is_grouped_by_its_first_line():
    failure = '{"message":"%s","errtype":"E","backtrace":["app/jobs/mail.rb:%d:in perform","lib/worker.rb:3:in run"]}'
    for line in (10, 11):
        dead(errtype="E", failure=failure % (f"text {line}", line))
    [group] = error_groups.group_failed(using="default").groups
    assert group.kind.place == "app/jobs/mail.rb:in perform"


def test_dead_and_retrying_jobs_are_in_one_group(admin_client):
    dead(1)
    JobFactory.create_batch(2, retries=True, errtype="net.Timeout", jobtype="shop.send", failure=TIMEOUT % 2)
    [group] = error_groups.group_failed(using="default").groups
    assert (group.count, group.retrying) == (1, 2)
    assert "Waiting to retry 2" in words(page(admin_client, "error", group.kind.query))


def test_the_page_of_a_group_shows_the_latest_failure_first(admin_client):
    for number, hour in enumerate((1, 3, 2)):
        at = T0 + timedelta(hours=hour)
        dead(number, failed_at=at, finished_at=at, failure=TRACEBACK % (f'"no {number}"', 1), errtype="E")
    [group] = error_groups.group_failed(using="default").groups
    assert (group.first_at, group.latest_at) == (T0 + timedelta(hours=1), T0 + timedelta(hours=3))
    answer = admin_client.get(f"{reverse('admin:django_faktory_job_error')}?{group.kind.query}")
    assert [job.failed_at.hour - T0.hour for job in answer.context["latest"]] == [3, 2, 1]
    assert answer.context["failure"]["message"] == "no 1"


def test_a_group_of_retrying_jobs_has_the_times_of_its_failures(admin_client):
    for hour in (2, 4, 3):
        JobFactory(retries=True, errtype="E", failed_at=T0 + timedelta(hours=hour))
    [group] = error_groups.group_failed(using="default").groups
    assert (group.first_at, group.latest_at) == (T0 + timedelta(hours=2), T0 + timedelta(hours=4))


def test_a_group_of_retrying_jobs_shows_the_failure_and_no_buttons_for_dead_jobs(admin_client):
    JobFactory(retries=True, errtype="E", jobtype="shop.send", failure=TRACEBACK % ('"no"', 1))
    [group] = error_groups.group_failed(using="default").groups
    shown = words(page(admin_client, "error", group.kind.query))
    assert "client.pay(card)" in shown
    assert "No dead jobs are left." in shown
    assert "Test one" not in shown


@pytest.mark.parametrize("failure", ["", "{", '{"backtrace":"text"}', '{"backtrace":[1,{}]}', '{"message":"cut'])
def test_a_failure_that_is_no_job_failure_has_a_page(admin_client, failure):
    job = dead(failure=failure)
    assert page(admin_client, "error", error_groups.read_kind(job).query)


def test_error_groups_report_how_many_jobs_were_examined(admin_client, monkeypatch):
    [dead(number) for number in range(3)]
    found = error_groups.group_failed(using="default", limit=2)
    assert (found.jobs_read, found.jobs_total, found.is_more, found.groups[0].count) == (2, 3, True, 2)


def test_a_group_shows_the_message_of_its_latest_failure_and_no_pattern(admin_client):
    for number, hour in enumerate((1, 3, 2)):
        fields = {"errtype": "KeyError", "failed_at": T0 + timedelta(hours=hour)}
        JobFactory(dead=True, failure=f"""{{"message":"'refund_account_{number}'"}}""", **fields)
    later = {"errtype": "KeyError", "failed_at": T0 + timedelta(hours=4)}
    JobFactory(retries=True, failure='{"message":"\'refund_account_9\'"}', **later)
    [group] = error_groups.group_failed(using="default").groups
    assert (group.kind.place, group.frame, group.message) == ("N", "", "'refund_account_9'")
    assert "'refund_account_9'" in words(page(admin_client, "errors"))
    assert "Message 'refund_account_1'" in words(page(admin_client, "error", group.kind.query)), "of the dead jobs"


def test_numbers_of_groups_have_separators_and_a_cut_list_names_its_total(admin_client):
    Job.objects.bulk_create(JobFactory.many(error_groups.JOBS_READ + 1, dead=True))
    shown = words(page(admin_client, "errors"))
    assert "The latest 3,000 of 3,001 failed jobs, grouped." in shown
    assert "waiting to retry error task queues first latest 3,000 0 " in shown


def test_a_test_of_one_dead_job_shows_its_progress_and_outcome(admin_client):
    job, other = dead(1), dead(2)
    answer = admin_client.post(reverse("admin:django_faktory_job_try", args=[job.pk]), {"why": "deployed"}, follow=True)
    assert "Waiting for a worker" in words(answer.content.decode())
    assert dict(Job.objects.values_list("pk", "state")) == {job.pk: "enqueued", other.pk: "dead"}
    assert LogEntry.objects.get().get_change_message() == "Retried as a test: deployed"
    query = f"{KIND.query}&tried={job.pk}"
    for state, outcome in (("working", "Running"), ("dead", "Failed again"), ("succeeded", "Succeeded")):
        fields = {
            "state": state,
            "started_at": T0,
            "finished_at": T0,
            "reserved_until": T0,
            "purge_at": T0,
            "attempt": 1,
        }
        if state == "succeeded":
            end_all(Job.live.filter(pk=job.pk), **fields)
        else:
            Job.live.filter(pk=job.pk).update(**fields)
        part = page(admin_client, "tried", query)
        assert outcome in words(part)
        assert ("data-faktory-ended" in part) is (state != "working")
    Job.objects.filter(pk=job.pk).delete()
    assert "has no row" in words(page(admin_client, "tried", query))


@pytest.mark.parametrize("tried", ["x", "", "9" * 30, "-1"])
def test_an_invalid_job_id_in_the_url_shows_nothing(admin_client, tried):
    assert words(page(admin_client, "tried", f"{KIND.query}&tried={tried}")) == ""


def test_a_job_that_is_no_longer_dead_is_not_tested(admin_client):
    job = JobFactory(succeeded=True)
    answer = admin_client.post(reverse("admin:django_faktory_job_try", args=[job.pk]), follow=True)
    assert "Nothing done: the job is now succeeded." in words(answer.content.decode())


def test_only_jobs_of_the_error_group_are_retried(admin_client):
    mine = [dead(number) for number in range(3)]
    others = [dead(1, failure='{"message":"something else"}'), dead(1, jobtype="shop.other"), JobFactory(dead=True)]
    shown, _ = all_of(admin_client, "retry", KIND.query, why="deployed")
    assert "Done. Retried: 3." in shown
    assert set(Job.objects.enqueued()) == set(mine)
    assert set(Job.objects.dead()) == set(others)
    assert [entry.get_change_message() for entry in LogEntry.objects.order_by("pk")] == [
        "Retry now: begun for all matching jobs (3): deployed",
        "Retried 3 of all matching jobs: deployed",
    ]
    assert "order N took N s" in LogEntry.objects.first().object_repr


@pytest.mark.parametrize("pace", ["nan", "-1", "x", "inf", "0"])
def test_an_invalid_retry_rate_means_an_immediate_retry(admin_client, pace):
    dead()
    all_of(admin_client, "retry", KIND.query, per_minute=pace)
    assert Job.objects.get().state == "enqueued"


def test_a_bulk_retry_runs_in_steps_and_ignores_jobs_that_die_later(admin_client, admin_user, rf):
    fields = {"errtype": "net.Timeout", "jobtype": "shop.send", "failure": TIMEOUT % 1}
    Job.objects.bulk_create(JobFactory.many(bulk.CHUNK * 5 // 4, dead=True, **fields))
    first = admin_client.post(f"{reverse('admin:django_faktory_job_all')}?verb=retry&{KIND.query}").content.decode()
    later = dead(9)
    [sealed] = re.findall(r'name="run" value="([^"]+)"', first)
    step = reverse("admin:django_faktory_job_all_step")
    request = rf.post(step, {"run": sealed})
    request.user = admin_user
    shown = JobAdmin(Job, admin.site)._step(request, max_work_s=0).render().content.decode()
    assert f"Retried: {bulk.CHUNK} of {bulk.CHUNK * 5 // 4}." in words(shown)
    assert 'value="80"' in shown
    while match := re.search(r'name="run" value="([^"]+)"', shown):
        shown = admin_client.post(step, {"run": match[1]}).content.decode()
    assert list(Job.objects.dead()) == [later]


@pytest.mark.parametrize("scope", [{"kind": KIND}, {"query": "error:net.Timeout"}], ids=str)
def test_a_count_that_ends_at_its_maximum_is_a_lower_bound(scope):
    [dead(number) for number in range(3)]
    run = bulk.begin("retry", **scope, using="default")
    count = count_jobs(run, using="default", max_count=2)
    assert (str(count), format_capped(count, COUNTED)) == ("2+", "2+")
    assert str(count_jobs(run, using="default", max_count=3)) == "3"


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
    edited = 'Edited its arguments from [1] {"a":1} to [2]: typo'
    assert LogEntry.objects.get().get_change_message() == edited
    shown = words(page(admin_client, "change", "", job.pk))
    assert shown.index(edited) < shown.index("Dead 2026")
    assert "by admin" in shown


def test_an_edit_is_logged_without_arguments_if_the_project_hides_some(admin_client, settings):
    settings.FAKTORY = {"REDACT": "tests.project.redacting.hides_cards"}
    job = dead(payload='{"jid":"a-job-12","jobtype":"shop.send","args":[1],"queue":"default","retry":25}')
    address = reverse("admin:django_faktory_job_edit", args=[job.pk])
    admin_client.post(address, {"args": '[{"card": "4111"}]', "kwargs": ""})
    assert LogEntry.objects.get().get_change_message() == "Edited its arguments."


def test_a_paced_retry_shows_its_duration_and_end_and_can_be_stopped(admin_client):
    failure = '{"message":"no answer","backtrace":[]}'
    jobs = JobFactory.create_batch(3, dead=True, jobtype="shop.send", errtype="x.Timeout", failure=failure)
    kind = "error=x.Timeout&task=shop.send&at=no+answer"
    asked = admin_client.get(f"/admin/django_faktory/job/all/?verb=retry&{kind}").content.decode()
    assert "10 per minute, takes 18 s" in asked
    begun = admin_client.post(f"/admin/django_faktory/job/all/?verb=retry&{kind}", {"per_minute": "10"})
    run = begun.context["signed_run"]
    ended = admin_client.post("/admin/django_faktory/job/all/step/", {"run": run})
    assert "They run one after the other, the last one at" in ended.content.decode()
    group = admin_client.get(ended.context["error_url"])
    last = max(Job.objects.filter(state="retries").values_list("run_at", flat=True))
    assert group.context["last_retry_at"] == last
    assert "Kill them…" in group.content.decode()
    begun = admin_client.post(f"/admin/django_faktory/job/all/?verb=kill&{kind}")
    admin_client.post("/admin/django_faktory/job/all/step/", {"run": begun.context["signed_run"]})
    assert Job.objects.filter(state="dead").count() == len(jobs)


def test_the_page_of_a_group_counts_failures_of_the_last_day_by_hour(admin_client):
    now = timezone.now()
    for hours in (0, 0, 3, 30):
        JobFactory(dead=True, jobtype="shop.send", errtype="x.Timeout", finished_at=now - timedelta(hours=hours))
    chart = admin_client.get("/admin/django_faktory/job/errors/one/?error=x.Timeout&task=shop.send&at=").context[
        "chart"
    ]
    assert sorted(point.failed for point in chart.points) == [1, 2]
