"""Compare steps with bare transactions: one INSERT in `context.step` and in `atomic()`, rows in `each` and in a loop.

    python -m benchmarks.steps            (PostgreSQL; BENCH_DATABASE=sqlite or mariadb for another database)

Both do the same statements and commits in the same thread, and alternate in one run; ratios are medians over the
rounds. The loop reads chunks by the primary key, as a task without `each` would have to.
"""

import itertools
import json
import statistics
import time

from benchmarks.database import machine, prepare

ROUNDS = 20
CALLS = 200
ROWS, BY = 20_000, 500


def main():
    prepare()
    print(json.dumps(machine(), indent=2))
    from django.db import connection, models, transaction

    from django_faktory.brokers import get_broker
    from django_faktory.core.job_control import Control
    from django_faktory.core.payloads import FetchRequest
    from django_faktory.tasks.rows import Rows
    from django_faktory.tasks.steps import Step, Steps

    from . import tasks

    class Line(models.Model):
        number = models.BigIntegerField()

        class Meta:
            app_label = "benchmarks"

        def __str__(self):
            return f"{self.number}"

    with connection.schema_editor() as editor:
        editor.create_model(Line)
    tasks.noop.enqueue(42, "text")
    [[job]] = get_broker().fetch([FetchRequest(queues=("default",), wid="w")])

    def steps():
        return Steps(get_broker(), job, Control(), is_encrypted=False, is_atomic=False)

    numbers = itertools.count()

    def bare_steps():
        for _ in range(CALLS):
            with transaction.atomic():
                Line.objects.create(number=1)

    def our_steps():
        here = steps()
        for _ in range(CALLS):
            with Step(here, "line", next(numbers)):
                Line.objects.create(number=1)
        connection.cursor().execute("DELETE FROM django_faktory_jobstep")

    def bare_rows():
        last = 0
        while True:
            with transaction.atomic():
                found = list(Line.objects.filter(pk__gt=last, number=0).order_by("pk")[:BY])
                for _ in found:
                    Line.objects.create(number=1)
            if not found:
                return
            last = found[-1].pk

    def our_rows():
        with Rows(steps(), Line.objects.filter(number=0), name=str(next(numbers)), by=BY, key=None, total=None) as rows:
            for _ in rows:
                Line.objects.create(number=1)

    compare("step", bare_steps, our_steps, CALLS, ROUNDS)
    Line.objects.all().delete()
    Line.objects.bulk_create([Line(number=0)] * ROWS, batch_size=500)
    if connection.vendor == "postgresql":
        connection.cursor().execute("VACUUM ANALYZE")
    compare("row with one INSERT", bare_rows, our_rows, ROWS, 6)


def compare(what, bare, ours, count, rounds):
    for call in (bare, ours):
        call()
    turns = [(seconds(bare) / count * 1e6, seconds(ours) / count * 1e6) for _ in range(rounds)]
    bare_us, ours_us = (statistics.median(column) for column in zip(*turns, strict=True))
    ratio = statistics.median(ours / bare for bare, ours in turns)
    print(f"{what}: bare {bare_us:.1f} µs, ours {ours_us:.1f} µs, ratio {ratio:.2f}")


def seconds(call):
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
