"""Admin pages of tasks: timings, charts, errors, limit and cron entries of a task, and its pause."""

from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse
from django.utils import timezone

from django_faktory.admin.overview.charts import Latencies, build_line_chart
from django_faktory.core.histograms import JobTiming, Recorder
from django_faktory.models import Limit
from django_faktory.models.cron import CronEntry
from django_faktory.store.limits import definitions
from django_faktory.store.statistics import histograms
from tests.factories import JobFactory, WorkerFactory

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]
TASK = "shop.tasks.send"


@pytest.fixture
def tasks_url():
    return reverse("admin:django_faktory_tasks")


@pytest.fixture
def task_url():
    return f"{reverse('admin:django_faktory_task')}?task={TASK}"


def run(name=TASK, *, queue="mail", succeeded=3, failed=1, seconds=0.05, ago=timedelta(minutes=3)):
    recorder = Recorder()
    jobs = [JobTiming(queue, name, seconds)] * (succeeded + failed)
    recorder.started(jobs)
    recorder.ended(jobs[:succeeded], succeeded=True)
    recorder.ended(jobs[succeeded:], succeeded=False)
    histograms.add(recorder.take(), using="default", now=timezone.now() - ago)


def test_the_page_lists_tasks_and_queues_with_failures_and_quantiles(admin_client, tasks_url):
    run()
    run("shop.tasks.slow", queue="low", seconds=40.0, failed=0)
    page = admin_client.get(tasks_url)
    [send, slow] = page.context["tasks"]
    assert (send.timing.name, send.timing.ended, send.failed_percent, send.is_bad) == (TASK, 4, "25 %", False)
    assert slow.timing.name == "shop.tasks.slow"
    assert slow.runs[0].endswith(" s")
    assert {line.timing.name for line in page.context["queues"]} == {"mail", "low"}
    assert "tests.project.tasks.add" in dict(page.context["idle_tasks"])


def test_a_longer_period_includes_older_jobs(admin_client, tasks_url):
    run(ago=timedelta(hours=20))
    assert admin_client.get(tasks_url).context["tasks"] == []
    [line] = admin_client.get(f"{tasks_url}?period=24h").context["tasks"]
    assert line.timing.ended == 4
    assert admin_client.get(f"{tasks_url}?period=nonsense").status_code == 200


def test_the_page_of_a_task_shows_timings_errors_limit_and_cron_entries(admin_client, task_url):
    run()
    WorkerFactory(started_at=timezone.now() - timedelta(minutes=20))
    JobFactory(dead=True, jobtype=TASK, errtype="shop.Declined", failure='{"message":"card declined"}')
    JobFactory(dead=True, jobtype="shop.tasks.other", errtype="shop.Unrelated")
    definitions.pause([TASK], using="default")
    CronEntry.objects.create(name="hourly", schedule="0 * * * *", zone="UTC", jobtype=TASK, next_at=timezone.now())
    page = admin_client.get(task_url)
    text = page.content.decode()
    assert "shop.Declined" in text
    assert "shop.Unrelated" not in text
    assert "Resume task" in text
    assert "hourly" in text
    [mark] = page.context["charts"].jobs.marks
    assert "1 worker started" in mark.title
    assert [line.timing.ended for _, line in page.context["totals"]] == [4, 4, 4]


def test_a_task_is_paused_and_resumed_on_its_page_with_a_reason(admin_client, task_url):
    pause = reverse("admin:django_faktory_task_pause")
    admin_client.post(pause, {"task": TASK, "verb": "pause", "why": "bad deploy"})
    assert Limit.objects.get(scope="task", name=TASK).paused_at is not None
    assert LogEntry.objects.latest("pk").change_message == "Paused: bad deploy"
    again = admin_client.post(pause, {"task": TASK, "verb": "pause"}, follow=True)
    assert "was paused already" in again.content.decode()
    admin_client.post(pause, {"task": TASK, "verb": "resume"})
    assert not Limit.objects.exists()
    assert LogEntry.objects.count() == 2


@pytest.mark.parametrize("name", ["", "nul%00"])
def test_a_task_without_a_storable_name_is_not_found(admin_client, name):
    assert admin_client.get(f"{reverse('admin:django_faktory_task')}?task={name}").status_code == 404


def test_an_unknown_verb_is_refused(admin_client):
    answer = admin_client.post(reverse("admin:django_faktory_task_pause"), {"task": TASK, "verb": "delete"})
    assert answer.status_code == 403


def test_hostile_names_of_tasks_do_not_become_html(admin_client):
    name = '<script>alert(1)</script>"\u202e%s'
    run(name)
    page = admin_client.get(reverse("admin:django_faktory_tasks"))
    assert b"<script>alert" not in page.content
    [line] = page.context["tasks"]
    one = admin_client.get(line.link)
    assert one.context["task"] == name
    assert b"<script>alert" not in one.content


def test_a_line_chart_leaves_gaps_for_intervals_without_jobs():
    values = [None, 0.001, 0.1, None, 1.0]
    chart = build_line_chart("Run time", [Latencies(str(n), one, one, one) for n, one in enumerate(values)])
    assert chart.axes.y_labels == ("1 s", "100 ms", "10 ms", "1 ms")
    assert chart.lines[0].path == "M15 100h0L25 33.33M45 0h0"
    assert [label for label, *_ in chart.points] == ["1", "2", "4"]
