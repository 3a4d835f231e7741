"""Declare both tasks for django_faktory."""

from benchmarks.peers.project import work
from django_faktory import task


@task
def noop(number, text):
    work.noop(number, text)


@task
def insert(number, text):
    work.insert(number, text)
