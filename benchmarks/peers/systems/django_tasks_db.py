"""django-tasks-db with four workers, because each runs one job at a time; it has no bulk call."""

from ..system import ON_SQLITE, System, django


class DjangoTasksDb(System):
    name = "django-tasks-db"
    title = "django-tasks-db"
    requirements = ("django-tasks-db",)
    environment = "django-tasks-db"
    tasks = "benchmarks.peers.tasks.django_tasks"
    apps = ("django_tasks_db",)
    layout = "4 × `db_worker --interval 1 --no-startup-delay`; many: a loop in one transaction"

    def settings(self):
        return {"TASKS": {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}}

    def commands(self):
        return [django("db_worker", "--interval", "1", "--no-startup-delay", "--no-reload")] * 4

    def enqueue_many(self, kind, numbers):
        from django.db import transaction

        with transaction.atomic():
            for number in numbers:
                self.enqueue(kind, number)

    def left(self):
        from django_tasks_db.models import DBTaskResult

        return DBTaskResult.objects.exclude(status="SUCCESSFUL").count()


class DjangoTasksDbSqlite(DjangoTasksDb):
    name = "django-tasks-db-sqlite"
    title = "django-tasks-db on SQLite"
    store = "SQLite"
    promise = ON_SQLITE
    measures = ("noop", "insert")
    layout = "the same on SQLite (WAL, synchronous=NORMAL), 1 worker: more of them are slower"

    def commands(self):
        return super().commands()[:1]
