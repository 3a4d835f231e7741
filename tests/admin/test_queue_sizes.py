"""One number for one thing: the waiting jobs of a queue are the same on each page, in the bar and in its alarm."""

import pytest
from django.urls import reverse

from django_faktory.models import Job, Queue
from django_faktory.store import shared_reads
from tests.admin.pages import words
from tests.factories import JobFactory, QueueFactory, WorkerFactory

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]


def texts(client):
    """Return the words of each page that shows the size of the queue, and the badge of the bar."""
    shared_reads.forget()
    pages = {
        name: client.get(reverse(f"admin:django_faktory_{name}", args=args)).content.decode()
        for name, *args in (("overview_changelist",), ("queue_changelist",), ("queue_change", "mail"))
    }
    return {name: words(page) for name, page in pages.items()}


@pytest.mark.parametrize("is_large", [False, True])
def test_each_page_shows_the_same_number_of_waiting_jobs(admin_client, is_large):
    QueueFactory(name="mail")
    enqueued, blocked = (900, 600) if is_large else (3, 2)
    Job.objects.bulk_create(JobFactory.many(enqueued, queue="mail"))
    Job.objects.bulk_create(JobFactory.many(blocked, queue="mail", blocked=True))
    Queue.objects.all().pause(by="anna")
    number, text = ("1,500", "1,500, of them 600 held") if is_large else ("5", "5, of them 2 held")
    seen = texts(admin_client)
    assert {name: f"{text} by limits or locks" in page for name, page in seen.items()} == dict.fromkeys(seen, True)
    assert f"Queue mail is paused; waiting: {text} by limits or locks" in seen["overview_changelist"]
    assert all(f"Queues {number} Workers" in page for page in seen.values())


def test_a_queue_whose_jobs_are_all_held_raises_no_alarm(admin_client):
    WorkerFactory(queues=["mail"], threads=5)
    QueueFactory(name="mail")
    Job.objects.bulk_create(JobFactory.many(50, queue="mail", blocked=True))
    assert "No worker takes jobs" not in texts(admin_client)["overview_changelist"]
