"""Declare both tasks for every backend of Django's Tasks framework."""

from django.tasks import task

from benchmarks.peers.project import work


@task
def noop(number, text):
    work.noop(number, text)


@task
def insert(number, text):
    work.insert(number, text)
