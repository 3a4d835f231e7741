"""Processes that stand still: their threads with them, and whatever they have locked."""

import os
import signal

from django.db import OperationalError, transaction

from django_faktory.models import Job, JobLock, WorkerProcess


def stand_still(pid):
    """Stop it between two of its transactions: within one it would keep the database, or a row, from everyone."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        if not _keeps_others_out():
            return
        os.kill(pid, signal.SIGCONT)


def _keeps_others_out():
    try:
        with transaction.atomic():
            for model in (Job, JobLock, WorkerProcess):
                list(model.objects.select_for_update(nowait=True))
    except OperationalError:
        return True
    return False
