"""Declare both tasks for Procrastinate."""

from procrastinate.contrib.django import app

from benchmarks.peers.project import work


@app.task
def noop(number, text):
    work.noop(number, text)


@app.task
def insert(number, text):
    work.insert(number, text)
