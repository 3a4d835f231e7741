"""Huey on Redis with processes, without results. It takes a job from the queue before running it: a crash loses it."""

import os
from urllib.parse import urlsplit

from ..system import RedisSystem, django, redis_url


class Huey(RedisSystem):
    name = "huey"
    title = "Huey + Redis"
    requirements = ("huey", "redis")
    environment = "huey"
    tasks = "benchmarks.peers.tasks.huey"
    apps = ("huey.contrib.djhuey",)
    layout = "`run_huey -w 4 -k process`, results off, `db_task` for the INSERT; many: a loop"
    promise = "none: taken before it runs, sent after the commit"
    times_jobs = 4

    def settings(self):
        at = urlsplit(redis_url())
        connection = {"host": at.hostname, "port": at.port}
        return {"HUEY": {"name": "bench", "results": False, "immediate": False, "connection": connection}}

    def commands(self):
        return [django("run_huey", "-w", "4", "-k", "process", "-q")]

    def enqueue(self, kind, number):
        self.task(kind)(number, "x")

    def enqueue_many(self, kind, numbers):
        for number in numbers:
            self.enqueue(kind, number)

    def left(self):
        from huey.contrib.djhuey import HUEY

        return HUEY.pending_count()


class HueySqlite(Huey):
    name = "huey-sqlite"
    title = "Huey on SQLite"
    store = "SQLite"
    layout = "the same with `SqliteHuey`, in a file of its own"
    measures = ("noop", "insert")

    def settings(self):
        connection = {"filename": f"{os.environ['BENCH_SQLITE']}-huey"}
        return {"HUEY": {"huey_class": "huey.SqliteHuey", "name": "bench", "results": False, "connection": connection}}

    def empty(self):
        from huey.contrib.djhuey import HUEY

        HUEY.flush()
