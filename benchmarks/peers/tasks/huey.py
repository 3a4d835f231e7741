"""Declare both tasks for Huey; the task with database access is a `db_task`, as Huey's documentation recommends."""

from huey.contrib.djhuey import db_task, task

from benchmarks.peers.project import work


@task()
def noop(number, text):
    work.noop(number, text)


@db_task()
def insert(number, text):
    work.insert(number, text)
