"""A worker process holds at most `queue_limits` jobs of a queue, and fetches again when one has ended."""

import pytest

from django_faktory.models import Job
from tests.waiting import wait_until
from tests.worker.blocking import gates, passes

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]


def working(queue):
    return Job.objects.filter(state="working", queue=queue).count()


def test_a_worker_holds_no_more_jobs_of_a_queue_than_its_queue_limit(work):
    for name in "abcd":
        passes.using(queue_name="few").enqueue(name)
    for name in "xyz":
        passes.using(queue_name="many").enqueue(name)
    work(queues=["few", "many"], concurrency=5, queue_limits={"few": 2})
    wait_until(lambda: (working("few"), working("many")) == (2, 3))
    for name in "xyz":
        gates[name].opened.set()
    wait_until(lambda: working("many") == 0)
    assert working("few") == 2
    gates["a"].opened.set()
    wait_until(lambda: "c" in gates)
    wait_until(lambda: working("few") == 2)
    for name in "bcd":
        gates[name].opened.set()
    wait_until(lambda: working("few") == 0)
