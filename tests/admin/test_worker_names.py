"""Workers have one name on all pages, host and process; a lost one is listed with the jobs that it ran."""

import re

import pytest
from django.urls import reverse
from django.utils import timezone

from django_faktory.admin.overview import data
from django_faktory.models import Job, JobLock
from django_faktory.operations import alarms
from tests.admin.pages import words
from tests.factories import WorkerFactory, staff_user
from tests.store.limits.conftest import Node, jid

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]
WID, NAME = "wid-of-the-worker", "vm-3:14426"
NAMED = f'title="{WID}"[^>]*><bdi>{NAME}</bdi>'


@pytest.fixture
def node():
    """Return a node whose worker runs the jobs `a` and `b`, of which `a` has a lock."""
    now = timezone.now()
    WorkerFactory(wid=WID, hostname="vm-3", pid=14426, seen_at=now, beat_at=now, queues=["default"], threads=2)
    node = Node()
    node.push("a", jobtype="shop.tasks.charge", custom={"lock": "order 7"})
    node.push("b")
    assert sorted(node.fetch(2, wid=WID)) == ["a", "b"]
    return node


def shown(client, name, *args):
    answer = client.get(reverse(f"admin:django_faktory_{name}", args=args))
    assert answer.status_code == 200
    return answer.content.decode()


@pytest.mark.parametrize("name", ["overview_changelist", "workerprocess_changelist", "joblock_changelist"])
def test_lists_show_host_and_process_of_a_worker(admin_client, node, name):
    page = shown(admin_client, name)
    assert re.search(NAMED, page)
    assert WID not in words(page)


def test_pages_of_jobs_and_locks_show_host_and_process_of_the_worker(admin_client, node):
    page = shown(admin_client, "job_change", Job.objects.get(jid=jid("a")).pk)
    assert f"Worker {NAME}" in words(page)
    assert re.search(rf"running since \S+ \S+ \S+ on {NAME}", words(page))
    assert NAME in shown(admin_client, "joblock_change", JobLock.objects.get().pk)
    assert f"Worker {NAME} Worker ID {WID}" in words(shown(admin_client, "workerprocess_change", WID))


def test_the_alarm_of_a_lost_worker_links_to_the_jobs_that_it_ran(admin_client, node):
    assert node.broker.lost([WID]) == 2
    [line] = [line for line in data.read(using="default").alarms if line.alarm.kind == "lost-worker"]
    assert line.alarm.affected == 2
    address, anchor = line.link.split("#")
    page = admin_client.get(address).content.decode()
    section = page[page.index(f'id="{anchor}"') :]
    assert re.search(NAMED, section)
    for name in "ab":
        job = Job.objects.get(jid=jid(name))
        assert f'<a href="{reverse("admin:django_faktory_job_change", args=[job.pk])}"><bdi>{job.jobtype}' in section
    assert "enqueued" in words(section)
    timeline = words(shown(admin_client, "job_change", Job.objects.get(jid=jid("a")).pk))
    assert f"worker {NAME} was lost while it ran this job" in timeline
    assert f"on {NAME}" in timeline


def test_a_job_of_a_lost_worker_that_is_gone_is_named_without_a_link(admin_client, node):
    node.broker.lost([WID])
    Job.objects.filter(jid=jid("b")).delete()
    section = shown(admin_client, "workerprocess_changelist").partition('id="faktory-lost"')[2]
    assert "noop (gone)" in words(section)


def test_jobs_of_a_lost_worker_need_the_permission_to_view_jobs(client, node):
    node.broker.lost([WID])
    client.force_login(staff_user("view_workerprocess"))
    section = shown(client, "workerprocess_changelist").partition('id="faktory-lost"')[2]
    assert NAME in section
    assert "shop.tasks.charge" not in section


def test_a_worker_without_jobs_is_lost_too(node):
    for name in "ab":
        node.ack(name, wid=WID)
    node.broker.lost([WID])
    [alarm] = [alarm for alarm in alarms.read_now(using="default") if alarm.kind == "lost-worker"]
    assert alarm.text == f"Worker {NAME} was lost"
