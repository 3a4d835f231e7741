"""What the harness asks of a system. One module of `systems/` for each; none imports its package before it is asked.

`settings`, `commands` and the attributes are read by the harness, in the project's own Python; the rest runs in the
system's environment, with Django set up.
"""

import importlib
import os

ON_SQLITE = "as durable as SQLite with these settings; enqueued with the business row"


class System:
    """One system in one set-up."""

    name = ""
    title = ""
    store = "PostgreSQL"  # or Redis, SQLite: where its jobs are
    ours = False
    requirements = ()
    environment = ""  # systems with the same share one
    tasks = ""
    tasks_found_by_name = True  # by the project's tasks.py; else the settings say where they are
    apps = ()
    layout = ""  # for the reader: processes, threads, what is not the default
    promise = "durable; enqueued with the business row"
    measures = None  # all, unless it says which
    times_jobs = 1  # a drain that is over in an instant measures nothing: the quick ones get more

    def settings(self):
        """The Django settings that this system adds."""
        return {}

    def commands(self):
        """What to start as its workers: the arguments of Python, a list for each."""
        raise NotImplementedError

    def task(self, kind):
        return getattr(importlib.import_module(self.tasks), kind)

    def enqueue(self, kind, number):
        self.task(kind).enqueue(number, "x")

    def enqueue_with_row(self, kind, number):
        """Enqueue inside of a transaction, as its documentation says that it is done there."""
        self.enqueue(kind, number)

    def enqueue_many(self, kind, numbers):
        raise NotImplementedError

    def empty(self):
        """Forget every job that is not in the database's tables; those are emptied anyway."""

    def left(self):
        """The number of jobs that its own store does not hold for done."""
        raise NotImplementedError


class RedisSystem(System):
    """One whose jobs are in Redis: they are sent once the transaction has committed."""

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
    """The arguments of Python for one of Django's commands."""
    return ["-m", "django", *arguments]
