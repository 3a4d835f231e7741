"""Factories for rows and payloads. Traits name the state; a row has the columns that the store would have written."""

from copy import copy
from datetime import UTC, datetime, timedelta

import factory
from django.contrib.auth.models import Permission, User
from django.db.models.base import ModelState
from factory.django import DjangoModelFactory

from django_faktory.core import payloads
from django_faktory.models import History, Job, JobLock, Queue, WorkerProcess
from django_faktory.models.cron import CronEntry

T0 = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
"""A fixed time for tests that pass `now`."""


def payload(jid=None, jobtype="noop", args=(), **fields):
    """Return a job as a producer creates it; a short jid is padded to a valid length."""
    payload.made += 1
    # Jobs of one set are stored in the order of their jids (ADR 0024), which is here the order of their creation.
    jid = f"job-{jid or f'{payload.made:06}'}".ljust(8, ".")
    return payloads.new_job(jid=jid, jobtype=jobtype, args=list(args), **fields)


payload.made = 0


def staff_user(*codenames):
    """Return a new staff user with these permissions of this app only."""
    user = User.objects.create_user(f"user{User.objects.count()}", is_staff=True)
    found = Permission.objects.filter(content_type__app_label="django_faktory", codename__in=codenames)
    assert {one.codename for one in found} == set(codenames)
    user.user_permissions.set(found)
    return user


def end_all(jobs=None, **values):
    """End these live jobs, or all of them, with these values as the store does: their rows move to the history."""
    for job in list(jobs or Job.live.all()):
        Job.live.filter(pk=job.pk).delete()
        for name, value in values.items():
            setattr(job, name, value)
        History.copy([job], using="default")


class JobFactory(DjangoModelFactory):
    class Meta:
        model = Job

    class Params:
        blocked = factory.Trait(state="blocked", lock_key="key")
        scheduled = factory.Trait(state="scheduled", run_at=T0 + timedelta(hours=1), enqueued_at=None)
        working = factory.Trait(
            state="working", wid="w1", attempt=1, started_at=T0, reserved_until=T0 + timedelta(seconds=1800)
        )
        retries = factory.Trait(
            state="retries", run_at=T0 + timedelta(hours=1), failures=1, attempt=1, wid="w1", failed_at=T0
        )
        dead = factory.Trait(
            state="dead",
            finished_at=T0,
            failed_at=T0,
            purge_at=T0 + timedelta(days=180),
            failures=26,
            attempt=26,
            wid="w1",
        )
        succeeded = factory.Trait(
            state="succeeded", finished_at=T0, purge_at=T0 + timedelta(days=1), attempt=1, wid="w1", result_ttl=86_400
        )
        discarded = factory.Trait(
            state="discarded", finished_at=T0, purge_at=T0 + timedelta(days=1), attempt=1, wid="w1", result_ttl=86_400
        )
        expired = factory.Trait(
            state="expired", finished_at=T0, purge_at=T0 + timedelta(days=1), attempt=1, wid="w1", result_ttl=86_400
        )

    jid = factory.Sequence(lambda n: f"row-{n:08d}")
    jobtype = "noop"
    queue = "default"
    state = "enqueued"
    enqueued_at = T0
    created_at = T0
    payload = factory.LazyAttribute(
        lambda job: (
            f'{{"jid":"{job.jid}","jobtype":"{job.jobtype}","queue":"{job.queue}","args":[],"retry":{job.retry}}}'
        )
    )
    retry = 25

    @classmethod
    def _generate(cls, strategy, params):
        # A trait without a value is looked up 39 times, each time with an error message that it is missing: 3 ms.
        return super()._generate(strategy, {**dict.fromkeys(cls._meta.parameters, False), **params})

    @classmethod
    def many(cls, count, **fields):
        """Return unsaved rows that differ only in jid: calling the factory thousands of times is too slow."""
        first = cls.build(**fields)
        rows = [copy(first) for _ in range(count)]
        for number, row in enumerate(rows):
            row._state = ModelState()
            row.jid = f"{first.jid}-{number:06d}"
            row.payload = first.payload.replace(first.jid, row.jid)
        return rows


class QueueFactory(DjangoModelFactory):
    class Meta:
        model = Queue

    name = factory.Sequence(lambda n: f"queue{n}")


class WorkerFactory(DjangoModelFactory):
    class Meta:
        model = WorkerProcess

    wid = factory.Sequence(lambda n: f"wid-{n}")
    hostname = "localhost"
    pid = 1


class CronFactory(DjangoModelFactory):
    class Meta:
        model = CronEntry

    name = factory.Sequence(lambda n: f"entry{n}")
    schedule = "0 3 * * *"
    zone = "UTC"
    jobtype = "noop"


class LockFactory(DjangoModelFactory):
    """A lock whose lease has ended."""

    class Meta:
        model = JobLock

    key = factory.Sequence(lambda n: f"key{n}")
    jid = factory.Sequence(lambda n: f"job-of-lock{n}")
    attempt = 1
    wid = "w1"
    lease = timedelta(seconds=35)
    acquired_at = expires_at = T0
