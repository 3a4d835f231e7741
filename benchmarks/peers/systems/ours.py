"""This project: `runfaktory --worker-only` with its defaults, with atomic tasks, and on SQLite."""

from ..system import ON_SQLITE, System, django


class Ours(System):
    name = "django-faktory"
    title = "django_faktory"
    ours = True
    requirements = ("-e", ".[postgres]")
    environment = "ours"
    tasks = "benchmarks.peers.tasks.ours"
    apps = ("django_faktory",)
    layout = "`runfaktory --worker-only`, defaults: a process for each CPU, 5 threads each"
    times_jobs = 5

    def settings(self):
        return {"TASKS": {"default": {"BACKEND": "django_faktory.backend.FaktoryBackend", "QUEUES": []}}, "FAKTORY": {}}

    def commands(self):
        return [django("runfaktory", "--worker-only", "--no-reload")]

    def enqueue_many(self, kind, numbers):
        self.task(kind).enqueue_many([(number, "x") for number in numbers])

    def left(self):
        from django_faktory.models import Job

        return Job.objects.exclude(state="succeeded").count()


class OursAtomic(Ours):
    name = "django-faktory-atomic"
    title = "django_faktory, atomic tasks"
    tasks = "benchmarks.peers.tasks.ours_atomic"
    layout = "the same, `@task(atomic=True)`: the work and its job's end are one transaction"
    promise = "durable; enqueued with the business row; its end commits with the work"
    times_jobs = 1


class OursSqlite(Ours):
    name = "django-faktory-sqlite"
    title = "django_faktory on SQLite"
    store = "SQLite"
    layout = "the same on SQLite (WAL, synchronous=NORMAL): one process, 5 threads"
    promise = ON_SQLITE
