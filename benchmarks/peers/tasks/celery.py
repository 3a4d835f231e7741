"""Declare the app and both tasks for Celery."""

from celery import Celery

from benchmarks.peers.project import work

app = Celery("benchmarks")
app.config_from_object("django.conf:settings", namespace="CELERY")


@app.task
def noop(number, text):
    work.noop(number, text)


@app.task
def insert(number, text):
    work.insert(number, text)
