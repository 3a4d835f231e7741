"""Declare both tasks as actors of Dramatiq."""

import dramatiq

from benchmarks.peers.project import work


@dramatiq.actor
def noop(number, text):
    work.noop(number, text)


@dramatiq.actor
def insert(number, text):
    work.insert(number, text)
