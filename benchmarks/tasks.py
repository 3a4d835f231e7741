"""Tasks that the benchmarks run."""

import logging
import time

from django_faktory import task


@task
def noop(number, text):
    return None


# The line reaches no handler: a worker keeps it, and nothing else is measured.
logger = logging.getLogger("benchmarks.tasks")
logger.setLevel(logging.INFO)
logger.addHandler(logging.NullHandler())
logger.propagate = False


@task
def logged(number, text):
    logger.info("order %s of %s was charged", number, text)


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
