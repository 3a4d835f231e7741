"""Tasks that the benchmarks run."""

import time

from django_faktory import task


@task
def noop(number, text):
    return None


@task(expires_in=3600)
def expiring(number, text):
    return None


@task(lock=lambda number, text: f"lock-{number}")
def locked(number, text):
    return None


@task(unique_for=600)
def unique(number, text):
    return None


@task
def now():
    return time.time()
