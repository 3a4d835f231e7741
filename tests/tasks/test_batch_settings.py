"""FAKTORY settings for batches: how long an uncommitted one lives, and how long an ended one stays readable."""

from datetime import timedelta

import pytest
from django.db.models import F

from django_faktory import Batch, BatchClosed, UnknownBatch, task
from django_faktory.brokers import get_broker
from django_faktory.core.payloads import NewBatch
from django_faktory.models import Batch as Row
from django_faktory.runtime.maintenance import Maintenance
from django_faktory.testing import drain

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]


@task
def over(): ...


def uncommitted():
    callback = over.get_backend().callback_job(over, [], {})
    return get_broker().new_batch(NewBatch(success=callback))


def age_batches(**duration):
    """Move all times of batches into the past by this duration, and run maintenance."""
    times = ("created_at", "expires_at", "finished_at")
    Row.objects.update(**{name: F(name) - timedelta(**duration) for name in times})
    Maintenance("default").run_once()


@pytest.mark.parametrize(("own", "minutes"), [({}, 30), ({"BATCH_COMMIT_WITHIN": 300}, 5)])
def test_an_uncommitted_batch_expires_after_batch_commit_within(settings, own, minutes):
    settings.FAKTORY = own
    bid = uncommitted()
    age_batches(minutes=minutes - 1)
    assert get_broker().open_batch(bid) == bid
    age_batches(minutes=2)
    with pytest.raises(BatchClosed, match=f"{bid}: it was not committed in time, and expired"):
        get_broker().open_batch(bid)


@pytest.mark.parametrize(("own", "days"), [({}, 7), ({"BATCH_TTL": 2 * 86_400}, 2)])
def test_an_ended_batch_stays_readable_for_batch_ttl(settings, own, days):
    settings.FAKTORY = own
    with Batch(success=over) as batch:
        pass
    drain()
    age_batches(days=days, minutes=-1)
    assert batch.status().success_st == "2"
    age_batches(minutes=2)
    with pytest.raises(UnknownBatch, match=batch.bid):
        batch.status()


def test_an_unfinished_batch_is_never_purged():
    with Batch(success=over) as batch:
        over.enqueue()
    age_batches(days=400)
    assert batch.status().pending == 1
