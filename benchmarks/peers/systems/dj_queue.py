"""dj-queue with a supervisor that forks, and with NOTIFY on."""

from ..system import ON_SQLITE, System, django


class DjQueue(System):
    name = "dj-queue"
    title = "dj-queue"
    requirements = ("dj-queue[postgres]",)
    environment = "dj-queue"
    tasks = "benchmarks.peers.tasks.django_tasks"
    apps = ("dj_queue",)
    layout = "`dj_queue`, fork mode, 2 processes × 5 threads, NOTIFY on; many: `enqueue_all`"

    def settings(self):
        options = {"mode": "fork", "workers": [{"queues": "*", "threads": 5, "processes": 2}]}
        return {
            "DATABASE_ROUTERS": ["dj_queue.routers.DjQueueRouter"],
            "TASKS": {"default": {"BACKEND": "dj_queue.backend.DjQueueBackend", "QUEUES": [], "OPTIONS": options}},
        }

    def commands(self):
        return [django("dj_queue")]

    def enqueue_many(self, kind, numbers):
        task = self.task(kind)
        task.get_backend().enqueue_all([(task, [number, "x"], {}) for number in numbers])

    def left(self):
        from dj_queue.models import Job

        return Job.objects.filter(finished_at__isnull=True).count()


class DjQueueSqlite(DjQueue):
    name = "dj-queue-sqlite"
    title = "dj-queue on SQLite"
    store = "SQLite"
    promise = ON_SQLITE
    measures = ("noop", "insert")
    layout = "the same on SQLite (WAL, synchronous=NORMAL), which has no NOTIFY"
