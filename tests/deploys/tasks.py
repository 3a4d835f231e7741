"""Tasks for each way to end, which note the version that runs them. They use only features of every release."""

import os

from django_faktory import Retry, __version__, task
from tests.deploys.models import Line
from tests.faults.history import Scribe

_scribes = {}


def note(word, context, *more):
    """Write a note to the history of this process; a forked child creates its own."""
    pid = os.getpid()
    if pid not in _scribes:
        _scribes[pid] = Scribe(os.environ["FAKTORY_DEPLOYS_FOLDER"], f"w{pid}")
    _scribes[pid].note(word, context.task_result.id, __version__, *more)


@task(takes_context=True)
def ends(context):
    note("begin", context)
    note("end", context)


@task(takes_context=True, max_attempts=5)
def tried_again(context):
    if context.attempt == 1:
        note("first", context)
        raise Retry("at first", in_s=0)
    ends.func(context)


@task(takes_context=True, max_attempts=1)
def fails(context):
    ends.func(context)
    raise ValueError("fails on purpose")


@task(takes_context=True, atomic=True, backoff=lambda exception, task_result: 0)
def writes(context):
    note("begin", context)
    Line.objects.create(jid=context.task_result.id)
    note("end", context)


@task(takes_context=True, lock=lambda key: f"key {key}")
def locked(context, key):
    note("begin", context, str(key))
    note("end", context)


@task(takes_context=True, limit=2, unique_for=60)
def limited(context, what):
    context.progress(1, 2, what)
    ends.func(context)


@task(takes_context=True)
def called(context, word):
    note(word, context)
