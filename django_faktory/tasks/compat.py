"""Import Django's Tasks API from Django 6.0 and later, or from the `django-tasks` backport.

The only place that chooses between the two.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured

# The condition is a find_spec and not a try: an ImportError inside django.tasks must not select the backport.
if TYPE_CHECKING or find_spec("django.tasks"):
    from django.tasks import DEFAULT_TASK_BACKEND_ALIAS, TaskContext, TaskResult, TaskResultStatus, task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskError
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
elif find_spec("django_tasks"):
    from django_tasks import DEFAULT_TASK_BACKEND_ALIAS, TaskContext, TaskResult, TaskResultStatus, task_backends
    from django_tasks import exceptions as _exceptions
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task, TaskError
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started

    # Renamed: InvalidTaskError up to 0.12, InvalidTask in later releases.
    InvalidTask = getattr(_exceptions, "InvalidTask", None) or _exceptions.InvalidTaskError
else:
    raise ImproperlyConfigured(
        "django_faktory: Django before 6.0 has no Tasks API; install its backport: pip install django-tasks"
    )

if TYPE_CHECKING:
    from django.tasks.base import Task as GenericTask
    from django.tasks.base import TaskContext as GenericContext
    from django.tasks.base import TaskResult as GenericResult
else:

    def _subscriptable(base: type) -> type:
        return type(base.__name__, (), {"__class_getitem__": classmethod(lambda *_: base)})

    # The stubs' classes take type parameters, but Django's classes do not: `class X(GenericTask[P, R])` works with
    # both.
    GenericTask, GenericContext = _subscriptable(Task), _subscriptable(TaskContext)
    GenericResult = _subscriptable(TaskResult)

__all__ = [
    "DEFAULT_TASK_BACKEND_ALIAS",
    "BaseTaskBackend",
    "GenericContext",
    "GenericResult",
    "GenericTask",
    "InvalidTask",
    "Task",
    "TaskContext",
    "TaskError",
    "TaskResult",
    "TaskResultDoesNotExist",
    "TaskResultStatus",
    "task_backends",
    "task_enqueued",
    "task_finished",
    "task_started",
]
