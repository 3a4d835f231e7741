"""Tasks of batches in worker processes that are killed: each writes its row once, however often it was started."""

from django_faktory import Batch, BatchClosed, Retry, task
from tests.project.models import Mark


@task(atomic=True, takes_context=True)
def member(context, text, grows=False):
    """Fail some first attempts; with `grows`, add a job and a child to the batch."""
    if context.attempt == 1 and text.endswith("7"):
        raise Retry("at first", in_s=0)
    Mark.objects.create(text=f"member {text}")
    if grows:
        try:
            grow(context, text)
        except BatchClosed:  # the job was lost often enough to count as executed
            Mark.objects.create(text=f"too late {text}")


def grow(context, text):
    with context.batch:
        member.enqueue(f"{text} more")
        with Batch(description="grown", complete=completes, success=succeeds):
            member.enqueue(f"{text} child's")


@task(atomic=True, takes_context=True)
def completes(context):
    Mark.objects.create(text=f"complete {context.batch.bid}")


@task(atomic=True, takes_context=True)
def succeeds(context):
    Mark.objects.create(text=f"success {context.batch.bid}")
