"""Test that a page needs as many statements for 20 rows as for 3, and never counts a whole table."""

import re
from functools import partial

import pytest
from django.contrib import admin
from django.core.paginator import Paginator
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_faktory.admin.jobs.changelist import JobAdmin
from django_faktory.admin.lists import CappedPaginator
from django_faktory.models import Batch, Job, JobLock, OutboxEntry
from django_faktory.models.cron import CronEntry, CronRun
from tests.factories import T0, CronFactory, JobFactory, LockFactory, QueueFactory, WorkerFactory

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]

PAGES = {
    "overview": "overview/", "jobs": "job/", "dead jobs": "job/?state=dead", "jobs by error": "job/?q=error:E",
    "errors": "job/errors/", "an error": "job/errors/one/?error=E&task=noop&at=", "queues": "queue/",
    "workers": "workerprocess/", "batches": "batch/", "cron entries": "cronentry/", "locks": "joblock/",
    "outbox": "outboxentry/", "a job": "job/{job}/change/", "a queue": "queue/queue0/change/",
    "a worker": "workerprocess/wid0/change/", "a batch": "batch/{batch}/change/",
    "a cron entry": "cronentry/{entry}/change/", "a lock": "joblock/{lock}/change/", "all": "job/all/?verb=retry",
}  # fmt: skip


def make(first, last):
    """Create rows numbered `first` to `last` of each model; some share a worker, an entry or a batch."""
    for number in range(first, last):
        job = JobFactory(working=True, wid=f"wid{number}", queue=f"queue{number}", bid="root")
        JobFactory(queue="queue0")
        JobFactory(dead=True, errtype="E", failure='{"message":""}')
        JobFactory(working=True, wid="wid0")
        QueueFactory(name=f"queue{number}")
        WorkerFactory(wid=f"wid{number}", beat_at=T0)
        Batch.objects.create(bid=f"b{number}", parent_bid="root", depth=1)
        entry = CronFactory(name=f"cron{number}")
        CronRun.objects.create(entry=entry, tick=T0, jid=job.jid, outcome="enqueued")
        CronRun.objects.create(entry=CronEntry.objects.get(name="cron0"), jid=job.jid, outcome="enqueued")
        LockFactory(jid=job.jid, wid=job.wid)
        OutboxEntry.objects.create(jid=f"out{number}", queue=f"queue{number}", job="{}", error="no room")


def statements(client, path):
    client.get(path)  # fill the caches that Django fills once per process
    with CaptureQueriesContext(connection) as caught:
        answer = client.get(path)
    assert answer.status_code == 200
    # The overview asks a slow database a second time: that depends on the machine, not on the number of rows.
    return answer, [query["sql"] for query in caught if query["sql"] != "SELECT 1"]


def addresses():
    chosen = {
        "job": Job.objects.filter(bid="root").first().pk, "batch": Batch.objects.get(bid="root").pk,
        "entry": CronEntry.objects.get(name="cron0").pk, "lock": JobLock.objects.first().pk,
    }  # fmt: skip
    return {name: f"/admin/django_faktory/{path.format(**chosen)}" for name, path in PAGES.items()}


@pytest.mark.slow
def test_pages_with_20_rows_take_as_many_statements_as_with_3(admin_client):
    Batch.objects.create(bid="root", children=20)
    make(0, 3)
    with_three = {name: statements(admin_client, path)[1] for name, path in addresses().items()}
    make(3, 20)
    for name, path in addresses().items():
        _, with_twenty = statements(admin_client, path)
        assert len(with_twenty) == len(with_three[name]), (name, with_twenty)
        assert len(with_twenty) <= 30, (name, with_twenty)


def test_no_page_counts_jobs_without_a_bound(admin_client):
    Batch.objects.create(bid="root", children=10)
    make(0, 3)
    unbounded = [
        (name, sql)
        for name, path in addresses().items()
        for sql in statements(admin_client, path)[1]
        if "COUNT(" in sql.upper() and "django_faktory_job" in sql and not is_bounded(sql)
    ]
    assert unbounded == []


def is_bounded(sql):
    """True if each count has a LIMIT, or counts the jobs of the page's workers."""
    counts = len(re.findall(r"COUNT\(", sql, re.IGNORECASE))
    return sql.count("LIMIT") >= counts or '"wid" IN' in sql.replace("`", '"')


def test_a_list_longer_than_its_maximum_shows_a_plus_sign(rf, admin_user):
    JobFactory.create_batch(5)
    page = JobAdmin(Job, admin.site)
    for max_count, text in ((10_000, "5 jobs"), (5, "5 jobs"), (4, "4+ jobs")):
        page.paginator = partial(CappedPaginator, max_count=max_count)
        request = rf.get(reverse("admin:django_faktory_job_changelist"))
        request.user = admin_user
        assert text in " ".join(page.changelist_view(request).render().content.decode().split())
    assert str(CappedPaginator(list(range(9000)), 50, max_count=4000).count) == "4,000+"


def test_every_list_of_an_unbounded_table_is_capped():
    """People create queues, workers and cron entries; the number of other rows grows without bound."""
    plain = {
        model._meta.model_name
        for model, site in admin.site._registry.items()
        if model._meta.app_label == "django_faktory" and site.paginator is Paginator
    }
    assert plain == {"overview", "queue", "workerprocess", "cronentry", "gearmonkeyfunction"}
