"""Declare both tasks for django_faktory, each in one transaction with the end of its job."""

from benchmarks.peers.project import work
from django_faktory import task


@task(atomic=True)
def noop(number, text):
    work.noop(number, text)


@task(atomic=True)
def insert(number, text):
    work.insert(number, text)
