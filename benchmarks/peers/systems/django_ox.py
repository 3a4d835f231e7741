"""django-ox with one supervisor, processes and threads."""

from ..system import ON_SQLITE, System, django


class DjangoOx(System):
    name = "django-ox"
    title = "django-ox"
    requirements = ("django-ox",)
    environment = "django-ox"
    tasks = "benchmarks.peers.tasks.django_tasks"
    apps = ("django_ox",)
    layout = "`ox_worker --processes 2 --concurrency 5 --interval 1`; many: `enqueue_many`"

    def settings(self):
        return {"TASKS": {"default": {"BACKEND": "django_ox.backend.OxBackend"}}}

    def commands(self):
        return [django("ox_worker", "--processes", "2", "--concurrency", "5", "--interval", "1")]

    def enqueue_many(self, kind, numbers):
        from django_ox.bulk import enqueue_many

        enqueue_many(self.task(kind), [((number, "x"), {}) for number in numbers])

    def left(self):
        from django_ox.models import OxTask

        return OxTask.objects.exclude(status="SUCCESSFUL").count()


class DjangoOxSqlite(DjangoOx):
    name = "django-ox-sqlite"
    title = "django-ox on SQLite"
    store = "SQLite"
    promise = ON_SQLITE
    measures = ("noop", "insert")
    layout = "the same on SQLite (WAL, synchronous=NORMAL)"
