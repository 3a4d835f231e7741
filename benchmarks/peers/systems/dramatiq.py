"""Dramatiq on Redis with django-dramatiq, without the middleware that writes a row at each change of a job."""

from ..system import RedisSystem, django, redis_url

MIDDLEWARE = [
    "dramatiq.middleware.AgeLimit",
    "dramatiq.middleware.TimeLimit",
    "dramatiq.middleware.Callbacks",
    "dramatiq.middleware.Retries",
    "django_dramatiq.middleware.DbConnectionsMiddleware",
]


class Dramatiq(RedisSystem):
    name = "dramatiq"
    title = "Dramatiq + Redis"
    requirements = ("dramatiq[redis]", "django-dramatiq")
    environment = "dramatiq"
    tasks = "benchmarks.peers.tasks.dramatiq"
    apps = ("django_dramatiq",)
    layout = "`rundramatiq`, 2 processes × 5 threads, AdminMiddleware and Prometheus off; many: a loop"
    promise = "acknowledged after the run; Redis keeps nothing on disk; sent after the commit"
    times_jobs = 2

    def settings(self):
        broker = "dramatiq.brokers.redis.RedisBroker"
        return {
            "DRAMATIQ_BROKER": {"BROKER": broker, "OPTIONS": {"url": redis_url()}, "MIDDLEWARE": MIDDLEWARE},
        }

    def commands(self):
        return [django("rundramatiq", "--processes", "2", "--threads", "5")]

    def enqueue(self, kind, number):
        self.task(kind).send(number, "x")

    def enqueue_many(self, kind, numbers):
        for number in numbers:
            self.enqueue(kind, number)

    def left(self):
        return self.redis().hlen("dramatiq:default.msgs")
