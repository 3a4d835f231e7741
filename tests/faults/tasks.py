"""A task that notes its begin and end, in one history for each process that runs it."""

import os
import random
import time

from django_faktory import task
from tests.faults.client import FAILING
from tests.faults.history import Scribe

_scribes = {}


def scribe():
    """Return the scribe of this process; a forked child creates its own."""
    pid = os.getpid()
    if pid not in _scribes:
        _scribes[pid] = Scribe(os.environ["FAKTORY_FAULTS_FOLDER"], f"w{pid}")
    return _scribes[pid]


@task(takes_context=True)
def step(context, number):
    scribe().note("begin", context.task_result.id, str(os.getpid()))
    time.sleep(random.choice((0.0, 0.0, 0.0, 0.02)))
    scribe().note("end", context.task_result.id, str(os.getpid()))
    if number % FAILING == 0:
        raise ValueError("fails on purpose")
