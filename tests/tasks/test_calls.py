"""A call that the task cannot take, or a queue that no worker serves, is refused where it is enqueued."""

import functools

import pytest
from asgiref.sync import async_to_sync
from django.test import override_settings

from django_faktory import Batch, Cron, push, task
from django_faktory.errors import InvalidCron
from django_faktory.models import Job
from django_faktory.tasks import cron
from django_faktory.tasks.compat import InvalidTask
from tests.project import tasks

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]

BACKEND = "django_faktory.backend.FaktoryBackend"
STRICT = {"default": {"BACKEND": BACKEND, "QUEUES": ["default", "mail", "low"]}}


def passes_on(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function("connection", *args, **kwargs)

    return wrapper


def send(order_id, email="", *, urgent=False):
    pass


def place(order_id, /, *lines, **options):
    pass


def report(*, day):
    pass


def audit(context, row):
    pass


@passes_on
def injected(connection, row):
    pass


send, place, report, injected = (
    task(name=f"calls.{function.__name__}")(function) for function in (send, place, report, injected)
)
audit = task(name="calls.audit", takes_context=True)(audit)

ACCEPTED = [
    (send, (1,), {}),
    (send, (1, "a@example.org"), {"urgent": True}),
    (send, (), {"order_id": 1, "email": ""}),
    (place, (1,), {}),
    (place, (1, 2, 3), {"order_id": 4, "gift": True}),
    (report, (), {"day": 1}),
    (audit, (1,), {}),
    (audit, (), {"row": 1}),
    (injected, (1,), {}),
]
REFUSED = [
    (send, (1, "", 3), {},
     r"calls\.send\(order_id, email='', \*, urgent=False\) cannot be called with \(1, '', 3\): too many"),
    (send, (), {}, r"with \(\): missing a required argument: 'order_id'"),
    (send, (1,), {"emial": "x"}, r"with \(1, emial='x'\): .*argument 'emial'; did you mean 'email'\?"),
    (send, (1,), {"order_id": 2}, r"multiple values for argument 'order_id'"),
    (place, (), {"order_id": 1}, r"'order_id'"),
    (report, (1,), {}, r"calls\.report\(\*, day\) cannot be called with \(1\): too many positional arguments"),
    (report, (), {}, r"missing a required( keyword-only)? argument: 'day'"),
    (audit, (1, 2), {}, r"calls\.audit\(row\) cannot be called with \(1, 2\): too many positional arguments"),
    (audit, (1,), {"context": 2}, r"unexpected keyword argument 'context'|multiple values for argument 'context'"),
]  # fmt: skip

WAYS = {
    "enqueue": lambda task, args, kwargs: task.enqueue(*args, **kwargs),
    "aenqueue": lambda task, args, kwargs: async_to_sync(task.aenqueue)(*args, **kwargs),
    "using": lambda task, args, kwargs: task.using(priority=5).enqueue(*args, **kwargs),
    "push": lambda task, args, kwargs: push(task.jobtype, *args, kwargs=kwargs),
    "callback": lambda task, args, kwargs: Batch(success=task.callback(*args, **kwargs)),
    "member": lambda task, args, kwargs: enqueue_in_batch(lambda: task.enqueue(*args, **kwargs)),
    "cron": lambda task, args, kwargs: cron.define_from_task(task, Cron("@daily", args=args, kwargs=kwargs)),
}


def enqueue_in_batch(enqueue):
    with Batch(success=tasks.noop):
        enqueue()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("task", "args", "kwargs", "message"), REFUSED)
def test_a_call_that_the_task_cannot_take_is_refused_everywhere(way, task, args, kwargs, message):
    if way == "cron":
        message = message.rpartition(": ")[2]  # the error of an entry names the call by its place
    with pytest.raises((TypeError, InvalidCron), match=message) as caught:
        WAYS[way](task, args, kwargs)
    assert "\n" not in str(caught.value)
    assert not Job.objects.exists()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("task", "args", "kwargs"), ACCEPTED)
def test_a_call_that_the_task_can_take_is_accepted_everywhere(way, task, args, kwargs):
    WAYS[way](task, args, kwargs)


def test_one_wrong_call_of_many_stores_no_job():
    with pytest.raises(TypeError, match=r"call 1: calls\.send\(.*\) cannot be called with \(1, 2, 3\)"):
        send.enqueue_many([(1,), (1, 2, 3)])
    assert not Job.objects.exists()


@pytest.mark.parametrize("call", [((1,), {"email": "x"}), ((1, 2), {}), ((), {"order_id": 1})])
def test_a_pair_of_args_and_kwargs_is_refused_with_the_accepted_forms(call):
    with pytest.raises(TypeError, match=r"call 0: .*dict of keyword arguments, .*got a pair \(args, kwargs\).*by name"):
        send.enqueue_many([call])
    assert not Job.objects.exists()


def test_a_wrong_call_shows_no_redacted_value(settings):
    settings.FAKTORY = {**settings.FAKTORY, "REDACT": "tests.project.redacting.hides_all"}
    with pytest.raises(TypeError, match=r"cannot be called with \[hidden\]: too many") as caught:
        send.enqueue("secret", "secret", "secret")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "enqueue",
    [
        lambda: tasks.noop.using(queue_name="mial"),
        lambda: task(queue_name="mial", name="calls.misspelt")(task_function),
        lambda: cron.define_from_task(tasks.noop, Cron("@daily", queue="mial")),
        lambda: cron.build_definition(
            {"name": "a", "schedule": "@daily", "jobtype": tasks.noop.jobtype, "queue": "mial"}
        ),
    ],
    ids=["using", "decorator", "cron of a task", "cron of settings"],
)  # fmt: skip
def test_a_queue_that_queues_does_not_list_is_refused_with_a_suggestion(enqueue):
    with override_settings(TASKS=STRICT), pytest.raises((InvalidTask, InvalidCron), match="did you mean 'mail'"):
        enqueue()


def task_function():
    pass
