"""Follow the paths of a person on call, each with at most as many clicks as the table in `test_click_paths` allows.

A click is one on a link, button or summary. Typing and choosing in the fields of a form are no clicks.
"""

import pytest

from django_faktory import task
from django_faktory.models import Job, Limit, Queue, WorkerProcess
from django_faktory.models.cron import CronEntry
from django_faktory.testing.live import LiveFaktory
from tests.browser.test_pages import NARROW, fill, pages
from tests.factories import JobFactory
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once]

PATH = "/admin/django_faktory/"


class Clicks:
    """A user who starts on a page and counts clicks."""

    def __init__(self, seen, start):
        self.seen, self.page, self.count = seen, seen.page, 0
        seen.go(start)

    def link(self, name, **options):
        self._click(self.page.locator("main").get_by_role("link", name=name, **options).first)

    def button(self, name, **options):
        self._click(self.page.locator("main").get_by_role("button", name=name, **options).first)

    def _click(self, target):
        self.count += 1
        target.click()

    def write(self, label, text):
        self.page.locator("main").get_by_label(label, exact=True).fill(text)

    def sees(self, *words):
        self.seen.sees(*words)


def find_what_is_wrong(user):
    user.link("Overview", exact=True)
    user.sees("Needs attention", "Queue partners is paused")


def find_why_a_task_fails(user):
    user.link("requests.exceptions.Timeout", exact=True)
    user.sees("25 dead jobs", "no answer in 30 s")


def retry_slowly(user):
    user.link("Retry 25 jobs")
    user.page.get_by_label("Pace").select_option("10")
    user.write("Reason", "the partner is back")
    user.button("Yes, retry now 25 jobs")
    user.sees("Done.", "one after the other")
    assert Job.objects.in_state("retries").filter(jobtype=NARROW).count() == 25


def pause_a_queue(user):
    user.link("mail", exact=True)
    user.write("Reason", "their upkeep")
    user.button("Pause")
    user.sees("Paused: 1 queue.")
    assert Queue.objects.get(name="mail").paused_at


def find_jobs_of_a_customer(user):
    user.page.locator("#searchbar").fill("text:grace@example.org")
    user._click(user.page.locator("#changelist-search input[type=submit]"))
    user.sees("shop.tasks.greet", "1 job")


def cancel_a_running_job(user):
    running = user.page.locator("section", has=user.page.locator("#faktory-running"))
    user._click(running.get_by_role("link", name="shop.tasks.send_invoice").first)
    user.button("Cancel")
    user.button("Yes, cancel")
    user.sees("Cancelled:")
    assert Job.objects.working().exclude(cancel_requested_at=None).count() == 1


def see_the_tree_of_a_batch(user):
    user.link("Batches", exact=True)
    user.link("delivery 42")
    user.sees("parcel 1", "parcel 2")


def change_a_limit(user):
    user.link("Limits", exact=True)
    user.link(NARROW)
    user.page.locator("#id_concurrency").fill("7")
    user.button("Save", exact=True)
    user.sees("changed successfully")
    assert Limit.objects.get(name=NARROW).concurrency == 7


def add_a_cron_entry(user):
    user.link("Add cron entry")
    user.page.wait_for_load_state()  # its script moves the focus to the first field, away from one that is being filled
    for field, text in (("name", "weekly"), ("schedule", "0 4 * * 1"), ("jobtype", "shop.tasks.daily_report")):
        user.page.locator(f"#id_{field}").fill(text)
    user.button("Save", exact=True)
    user.sees("added successfully")
    assert CronEntry.objects.get(name="weekly").schedule == "0 4 * * 1"


def quiet_a_worker(user):
    user.link("app-1:401")
    user.write("Reason", "we stop it")
    user.button("Quiet")
    user.sees("quiet requested for 1 worker")
    assert WorkerProcess.objects.get(wid="app-1-w1").state == "quiet"


def see_throughput_and_latency(user):
    user.link("mail", exact=True)
    user.sees("per minute", "p95")
    user.page.locator("figure.faktory-chart").first.wait_for()


@pytest.mark.parametrize(
    ("follow", "start", "most"),
    [
        (find_what_is_wrong, "home", 1),
        (find_why_a_task_fails, "overview", 3),
        (retry_slowly, "error", 2),
        (pause_a_queue, "overview", 2),
        (find_jobs_of_a_customer, "jobs", 1),
        (cancel_a_running_job, "overview", 3),
        (see_the_tree_of_a_batch, "overview", 2),
        (change_a_limit, "overview", 3),
        (add_a_cron_entry, "cron", 2),
        (quiet_a_worker, "overview", 2),
        (see_throughput_and_latency, "overview", 1),
    ],
)
def test_a_task_of_a_person_on_call_takes_few_clicks(screen, follow, start, most):
    order = fill()
    JobFactory(dead=True, jobtype="shop.tasks.greet", payload='{"jid":"g","args":["grace@example.org"]}')
    user = Clicks(screen(), f"{PATH}{({'home': '../'} | pages(order))[start]}")
    follow(user)
    assert user.count <= most
    assert user.seen.complaints == []


@task(max_attempts=1, queue_name="partners")
def charge(order):
    if order < 0:
        raise ValueError(f"order {order}: no such order")
    return order


def test_arguments_are_edited_and_tested_with_three_clicks(screen):
    with LiveFaktory(queues=["partners"]) as live:
        charge.enqueue(-1)
        wait_until(lambda: Job.objects.dead().exists())
        job = Job.objects.get()
        user = Clicks(screen(), f"{PATH}job/{job.pk}/change/")
        user.link("Edit arguments")
        user.page.get_by_label("order").fill("7")
        user.button("Save")
        user.sees("Arguments saved.")
        user.button("Test run")
        user.sees("Succeeded.")
        assert user.count <= 3
        assert Job.objects.get().state == "succeeded"
        assert user.seen.complaints == []
        live.stop()
