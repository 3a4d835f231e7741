"""Procrastinate: its Django connector enqueues; the worker has its own connection pool."""

from ..system import System, django


class Procrastinate(System):
    name = "procrastinate"
    title = "procrastinate"
    requirements = ("procrastinate[django]",)
    environment = "procrastinate"
    tasks = "benchmarks.peers.tasks.procrastinate"
    apps = ("procrastinate.contrib.django",)
    layout = "2 × `procrastinate worker -c 5`, NOTIFY on; many: `batch_defer`"

    def commands(self):
        return [django("procrastinate", "worker", "-c", "5")] * 2

    def enqueue(self, kind, number):
        self.task(kind).defer(number=number, text="x")

    def enqueue_many(self, kind, numbers):
        self.task(kind).batch_defer(*({"number": number, "text": "x"} for number in numbers))

    def left(self):
        from procrastinate.contrib.django.models import ProcrastinateJob

        return ProcrastinateJob.objects.exclude(status="succeeded").count()
