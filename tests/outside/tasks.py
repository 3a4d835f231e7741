"""Define the tasks that workers run. Each plays its script; a batch callback also notes which batch called it."""

import os

from django_faktory import task
from tests.outside.playing import Stage
from tests.project.models import Mark

_stages = {}


class Failed(Exception):
    """Raised by a task when its script says that it fails."""


def stage():
    """Return the stage of this process; a forked child creates its own."""
    pid = os.getpid()
    if pid not in _stages:
        _stages[pid] = Stage(os.environ["FAKTORY_OUTSIDE_FOLDER"], f"w{pid}")
    return _stages[pid]


def at_once(exception, task_result):
    return 0


def play(context, script):
    if stage().play(context.task_result.id, str(os.getpid()), script):
        raise Failed("as the script says")


@task(takes_context=True, backoff=at_once)
def work(context, script):
    play(context, script)


@task(takes_context=True, atomic=True, backoff=at_once)
def write(context, script):
    Mark.objects.create(text=f"effect {context.task_result.id}")
    play(context, script)


@task(takes_context=True, backoff=at_once)
def stepped(context, script):
    """Write an effect in each step. The script plays in the second one, so that most faults happen there."""
    for part in range(3):
        with context.step("part", key=part):
            Mark.objects.create(text=f"effect {context.task_result.id}.{part}")
            if part == 1:
                play(context, script)


@task(takes_context=True, max_attempts=1)
def long(context, script):
    play(context, script)


@task(takes_context=True, backoff=at_once, lock=lambda key, script: f"lock {key}")
def locked(context, key, script):
    play(context, script)


@task(takes_context=True, backoff=at_once, unique_for=3600)
def unique(context, key, script):
    play(context, script)


@task(takes_context=True, backoff=at_once)
def called(context, tag, kind, script):
    stage().note("called", context.task_result.id, tag, kind)
    play(context, script)


@task(takes_context=True, backoff=at_once)
def member(context, script):
    play(context, script)


@task(takes_context=True, max_attempts=3, backoff=at_once)
def fails(context, script):
    play(context, script)
