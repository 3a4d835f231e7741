"""`push`: jobs for workers elsewhere, of jobtypes that have no task here."""

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from asgiref.sync import async_to_sync

from django_faktory import Batch, FaktoryError, NotUnique, apush, push
from django_faktory.models import Job
from tests.project.tasks import noop

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]


def test_push_stores_a_job_without_a_task():
    jid = push(
        "Thumbnail", 42, {"size": "L"}, queue_name="images", priority=50, max_attempts=3, about="shop.order/7",
        custom={"track": 1},
    )  # fmt: skip
    job = Job.objects.get(jid=jid)
    assert (job.jobtype, job.queue, job.priority, job.retry, job.about) == (
        "Thumbnail",
        "images",
        50,
        2,
        "shop.order/7",
    )
    payload = json.loads(job.payload)
    assert payload["args"] == [42, {"size": "L"}]
    assert payload["custom"] == {"track": 1, "about": "shop.order/7"}


@pytest.mark.parametrize("is_time", [False, True])
def test_push_schedules_a_job(is_time):
    run_after = datetime.now(UTC) + timedelta(hours=1) if is_time else timedelta(hours=1)
    job = Job.objects.get(jid=async_to_sync(apush)("Thumbnail", run_after=run_after))
    assert job.state == "scheduled"
    assert timedelta(minutes=55) < job.run_at - datetime.now(UTC) < timedelta(minutes=65)


def test_push_joins_the_open_batch():
    with Batch(success=noop) as batch:
        push("Thumbnail", 1, custom={"unique_for": 60})
    assert batch.status().total == 1
    assert Job.objects.batch(batch.bid).get().jobtype == "Thumbnail"


def test_push_raises_the_refusal_of_a_job_that_is_not_unique():
    push("Thumbnail", 1, custom={"unique_for": 60})
    with pytest.raises(NotUnique):
        push("Thumbnail", 1, custom={"unique_for": 60})


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        (("",), {}, FaktoryError, "jobtype: expected a name"),
        (("A\x00",), {}, FaktoryError, "jobtype: expected a name"),
        ((noop,), {}, FaktoryError, "jobtype: expected a name"),
        (("A",), {"queue_name": "no such queue"}, FaktoryError, "queue names must match"),
        (("A",), {"priority": 101}, FaktoryError, "priority: expected -100 to 100"),
        (("A",), {"max_attempts": 0}, FaktoryError, "max_attempts: expected a whole number from 1"),
        (("A",), {"custom": {"unique_for": -1}}, FaktoryError, "unique_for"),
        (("A",), {"run_after": datetime(2026, 5, 1)}, TypeError, "aware datetime"),  # noqa: DTZ001
        (("A", Decimal("1.2")), {}, TypeError, r"args\[0\]"),
        (("A", float("nan")), {}, ValueError, r"args\[0\]"),
    ],
)
def test_push_rejects_invalid_values_and_stores_nothing(args, options, error, message):
    with pytest.raises(error, match=message):
        push(*args, **options)
    assert not Job.objects.exists()
