"""Huey's tasks; the one that uses the database is a `db_task`, as its documentation asks."""

from huey.contrib.djhuey import db_task, task

from benchmarks.peers.project import work


@task()
def noop(number, text):
    work.noop(number, text)


@db_task()
def insert(number, text):
    work.insert(number, text)
