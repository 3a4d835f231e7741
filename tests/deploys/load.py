"""Produce a steady load in a separate process: `python -m tests.deploys.load FOLDER NAME make|take|web …`.

`make` and `take` are wire clients, independent of the version. `web` is a Django process of the version on its path,
which enqueues tasks of every kind. `make` and `take` end as `tests.faults.client` does; `web` also ends when the file
NAME-ends exists.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

from tests.faults.client import Maker, Taker
from tests.faults.history import Scribe

PAUSE_S = 0.02
ROUND_S = 0.2


class SteadyMaker(Maker):
    def pace(self, number):
        time.sleep(PAUSE_S)


def web(folder, name):
    import django

    django.setup()
    from django.db import transaction
    from django.utils import timezone

    from django_faktory import Batch, __version__
    from tests.deploys import tasks

    scribe, ends = Scribe(folder, name), [Path(folder) / "make-ends", Path(folder) / f"{name}-ends"]

    def one_of_each(number):
        yield tasks.ends.enqueue()
        yield tasks.tried_again.enqueue()
        yield tasks.writes.enqueue()
        yield tasks.ends.using(run_after=timezone.now() + timedelta(seconds=0.5)).enqueue()
        yield tasks.locked.enqueue(number % 2)
        yield tasks.limited.enqueue(f"{name} {number}")
        if number % 5 == 0:
            yield tasks.fails.enqueue()
        yield from tasks.ends.enqueue_many([() for _ in range(3)])
        calls = {word: tasks.called.callback(word) for word in ("complete", "success")}
        with Batch(description="of a rollout", **calls) as batch:
            yield tasks.ends.enqueue()
            yield tasks.tried_again.enqueue()
        scribe.note("batch", batch.bid)

    number = 0
    while not any(end.exists() for end in ends):
        with transaction.atomic():
            jids = [result.id for result in one_of_each(number)]
            for jid in jids:
                scribe.note("sent", jid)
        for jid in jids:
            scribe.note("ok", jid, __version__)
        number += 1
        time.sleep(ROUND_S)


if __name__ == "__main__":
    folder, name, role, *more = sys.argv[1:]
    if role == "web":
        web(folder, name)
    else:
        {"make": SteadyMaker, "take": Taker}[role](folder, name).run(*more)
