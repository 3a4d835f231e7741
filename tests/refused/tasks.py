"""Tasks whose ends some databases refuse: `VALUES["guilty"]` is a text that the database of the test cannot store."""

import logging

from django_faktory import task
from django_faktory.models import Queue

logger = logging.getLogger("tests.refused")
VALUES = {}
runs = []


def use(context, where, name):
    runs.append(name)
    if where == "message":
        raise ValueError(VALUES["guilty"])
    if where == "log":
        logger.warning("line: %s", VALUES["guilty"])
    if where == "progress":
        context.progress(1, 2, VALUES["guilty"])
    return VALUES["guilty"] if where == "result" else "done"


@task(takes_context=True, max_attempts=3)
def plain(context, where, name):
    return use(context, where, name)


@task(takes_context=True, max_attempts=3, atomic=True)
def atomic(context, where, name):
    Queue.objects.create(name=name)
    return use(context, where, name)
