"""What the benchmarks run."""

import time

from django_faktory import task


@task
def noop(number, text):
    return None


@task
def now():
    return time.time()
