"""Tasks that run the program of a test, which uses the steps of their context."""

from django_faktory import task
from django_faktory.core.payloads import Failure
from django_faktory.models import Job, Step
from tests.project.models import Mark
from tests.tasks.work import work

programs = []


@task(takes_context=True)
def follows(context, *args):
    """Run the program that a test has set."""
    return programs[-1](context, *args)


@task(takes_context=True, atomic=True)
def follows_atomically(context):
    return programs[-1](context)


@task(takes_context=True)
async def follows_async(context):
    return await programs[-1](context)


@task(takes_context=True, encrypt=True)
def follows_in_secret(context, *args):
    return programs[-1](context, *args)


def run(program, *args, of=follows):
    """Enqueue a job that runs this program, run it once, and return the report."""
    programs.append(program)
    of.enqueue(*args)
    return work()


def again():
    """Run the same job again and return the report."""
    Job.objects.exclude(state="working").retry()
    return work()


def marks():
    return sorted(Mark.objects.values_list("text", flat=True))


def mark(text):
    Mark.objects.create(text=text)
    return text


def recorded():
    return list(Step.objects.order_by("recorded_at").values_list("name", "key"))


def message(report):
    assert isinstance(report, Failure)
    return report.message
