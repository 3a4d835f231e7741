"""Tasks that run the program of a test, which uses the steps of their context."""

import pytest

from django_faktory import task
from django_faktory.core.payloads import Failure
from django_faktory.models import Job, JobStep
from django_faktory.tasks import base
from tests.project.models import Mark
from tests.tasks.work import work

programs = []


@task(takes_context=True)
def follows(context, *args):
    """Run the program that a test has set."""
    return programs[-1](context, *args)


@task(takes_context=True, atomic=True)
def follows_atomically(context):
    return programs[-1](context)


@task(takes_context=True)
async def follows_async(context):
    return await programs[-1](context)


@task(takes_context=True, encrypt=True)
def follows_in_secret(context, *args):
    return programs[-1](context, *args)


# Registered only while its test runs: the system checks report a task that needs a key if none is configured.
del base._registry[follows_in_secret.jobtype]


@pytest.fixture
def in_secret(monkeypatch, settings):
    """Return the task with encrypted arguments, with a key."""
    monkeypatch.setitem(base._registry, follows_in_secret.jobtype, follows_in_secret)
    settings.FAKTORY = {"ENCRYPTION_KEYS": ["MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="]}
    return follows_in_secret


def run(program, *args, of=follows):
    """Enqueue a job that runs this program, run it once, and return the report."""
    programs.append(program)
    of.enqueue(*args)
    return work()


def again():
    """Run the same job again and return the report."""
    Job.objects.exclude(state="working").retry()
    return work()


def marks():
    return sorted(Mark.objects.values_list("text", flat=True))


def mark(text):
    Mark.objects.create(text=text)
    return text


def recorded():
    return list(JobStep.objects.order_by("recorded_at").values_list("name", "key"))


def message(report):
    assert isinstance(report, Failure)
    return report.message
