"""Requeue, restart, kill or discard jobs by their ids.

The package selects jobs for these transitions by `store.jobs.bulk`."""

from django_faktory.core.lifecycle import DEAD_FOR_S
from django_faktory.models import Job
from django_faktory.store.chunks import chunks
from django_faktory.store.jobs.bulk import CHUNK
from django_faktory.store.jobs.transitions import discarded, killed, requeued, restarted
from django_faktory.store.transactions import run


def requeue(ids, *, using):
    return _apply(requeued, ids, using)


def restart(ids, *, using):
    return _apply(restarted, ids, using)


def kill(ids, *, using, dead_for_s=DEAD_FOR_S):
    return _apply(killed(dead_for_s), ids, using)


def discard(ids, *, using):
    return _apply(discarded, ids, using)


def _apply(change, ids, using):
    """Apply the change to these jobs, one transaction for each `CHUNK`; return how many changed."""
    jobs = Job.objects.using(using)
    return sum(run(using, lambda _, chunk=chunk: change(jobs.filter(pk__in=chunk))) for chunk in chunks(ids, CHUNK))
