"""Celery on Redis: prefork, results off."""

from ..system import RedisSystem, redis_url


class Celery(RedisSystem):
    name = "celery"
    title = "Celery + Redis"
    requirements = ("celery[redis]",)
    environment = "celery"
    tasks = "benchmarks.peers.tasks.celery"
    layout = "prefork, 2 processes, prefetch × 64, no results, gossip, mingle nor heartbeat; many: a loop"
    promise = "none: early acknowledgement, sent after the commit"

    def settings(self):
        return {
            "CELERY_BROKER_URL": redis_url(),
            "CELERY_TASK_IGNORE_RESULT": True,
            "CELERY_WORKER_PREFETCH_MULTIPLIER": 64,
            "CELERY_WORKER_HIJACK_ROOT_LOGGER": False,
            "CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP": True,
            "CELERY_DB_REUSE_MAX": 1_000_000_000,  # otherwise it closes the database's connection after each job
        }

    def commands(self):
        options = "--pool prefork --concurrency 2 --loglevel WARNING --without-gossip --without-mingle"
        app = "benchmarks.peers.tasks.celery"
        return [["-m", "celery", "-A", app, "worker", *options.split(), "--without-heartbeat"]]

    def enqueue(self, kind, number):
        self.task(kind).delay(number, "x")

    def enqueue_with_row(self, kind, number):
        self.task(kind).delay_on_commit(number, "x")

    def enqueue_many(self, kind, numbers):
        for number in numbers:
            self.enqueue(kind, number)

    def left(self):
        return self.redis().llen("celery") + self.redis().hlen("unacked")
