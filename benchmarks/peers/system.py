"""The interface between the harness and a system. Each module of `systems/` imports its package only when called.

The harness reads `settings`, `commands` and the attributes in the project's own Python; all other methods run in the
system's environment, with Django set up.
"""

import importlib
import os

ON_SQLITE = "as durable as SQLite with these settings; enqueued with the business row"


class System:
    """One system in one configuration."""

    name = ""
    title = ""
    store = "PostgreSQL"  # or Redis, SQLite: the store of its jobs
    ours = False
    requirements = ()
    environment = ""  # systems with the same name share one
    tasks = ""
    tasks_found_by_name = True  # the project's tasks.py imports them; otherwise the settings name their module
    apps = ()
    layout = ""  # shown in the report: processes, threads, options that differ from the default
    promise = "durable; enqueued with the business row"
    measures = None  # names of measures; None for all
    times_jobs = 1  # factor for fast systems, because a very short drain measures nothing

    def settings(self):
        """Return the Django settings that this system adds."""
        return {}

    def commands(self):
        """Return the Python arguments with which to start its workers, a list for each process."""
        raise NotImplementedError

    def task(self, kind):
        return getattr(importlib.import_module(self.tasks), kind)

    def enqueue(self, kind, number):
        self.task(kind).enqueue(number, "x")

    def enqueue_with_row(self, kind, number):
        """Enqueue inside a transaction, in the way that the system's documentation recommends."""
        self.enqueue(kind, number)

    def enqueue_many(self, kind, numbers):
        raise NotImplementedError

    def empty(self):
        """Delete every job that is not in the database's tables; the tables are emptied separately."""

    def left(self):
        """Return the number of jobs that the system's own store does not record as done."""
        raise NotImplementedError


class RedisSystem(System):
    """A system that stores jobs in Redis, and sends them after the transaction has committed."""

    store = "Redis"
    apps = ()

    def enqueue_with_row(self, kind, number):
        from django.db import transaction

        transaction.on_commit(lambda: self.enqueue(kind, number))

    def empty(self):
        self.redis().flushall()

    def redis(self):
        import redis

        if not hasattr(self, "_redis"):
            self._redis = redis.Redis.from_url(redis_url())
        return self._redis


def redis_url():
    return os.environ["BENCH_REDIS"]


def django(*arguments):
    """Return the Python arguments of a Django command."""
    return ["-m", "django", *arguments]
