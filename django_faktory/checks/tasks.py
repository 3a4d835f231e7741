"""System checks of TASKS: backends exist, and the tasks modules can be imported (E014, E015, I002, W006).

`broken_modules` and `remedy_for` also serve commands that report such modules.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Info, Warning, register  # noqa: A004  (Django's name)
from django.utils.module_loading import import_string

from ..backend import FaktoryBackend
from ..core.suggestions import find_closest
from ..tasks.base import import_tasks, registered
from ..tasks.compat import DEFAULT_TASK_BACKEND_ALIAS

OURS = "django_faktory.backend.FaktoryBackend"
# By path, because `testing` is a layer above this one (ADR 0037).
FOR_TESTS = ("django_faktory.testing.backends.DummyBackend", "django_faktory.testing.backends.ImmediateBackend")

# Folders of the standard library, installed packages and this package: their frames are not the project's.
_FOREIGN_FOLDERS = (
    f"{Path(__file__).parent.parent}{os.sep}",
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)


class BrokenModule(NamedTuple):
    """A tasks module that cannot be imported, with the error and its place."""

    name: str
    error: Exception
    place: str

    def __str__(self) -> str:
        return f"{self.name} cannot be imported: {type(self.error).__name__}: {_first_line(self.error)} ({self.place})"


@register
def check_backends(**_: Any) -> list[CheckMessage]:
    """Check that every backend of TASKS can be imported.

    Django raises an exception for a missing backend, and the backport does not check it at all.
    """
    messages: list[CheckMessage] = []
    for alias, params in _entries():
        path = params.get("BACKEND") if isinstance(params, Mapping) else None
        problem = _problem_with_backend(path)
        if problem:
            closest = find_closest(str(path), (OURS, *FOR_TESTS))
            hint = f"Did you mean {closest!r}?" if closest else f'TASKS = {{"{alias}": {{"BACKEND": "{OURS}"}}}}'
            messages.append(
                Error(f"TASKS[{alias!r}]: BACKEND: {problem}", hint=hint, id="django_faktory.E014"),
            )
    return messages


@register
def check_tasks_modules(**_: Any) -> list[CheckMessage]:
    """Check that the `tasks` module of each app can be imported: otherwise no worker starts."""
    if not any(is_faktory_entry(params) for _, params in _entries()):
        return []
    hint = "A worker imports the tasks modules of all installed apps, and does not start without them."
    return [Error(str(module), hint=hint, id="django_faktory.E015") for module in broken_modules()]


@register
def check_tasks_of_other_apps(**_: Any) -> list[CheckMessage]:
    """Name the installed packages whose tasks the default backend takes: nobody in the project enqueues them."""
    if not is_faktory_entry(dict(_entries()).get(DEFAULT_TASK_BACKEND_ALIAS)):
        return []
    import_tasks()
    owners = Counter(
        app.name if (app := apps.get_containing_app_config(task.func.__module__)) else task.func.__module__
        for task in registered()
        if task.backend == DEFAULT_TASK_BACKEND_ALIAS and _is_of_other_package(task.func)
    )
    if not owners:
        return []
    names = ", ".join(f"{name} ({number})" for name, number in sorted(owners.items()))
    return [
        Info(
            f"TASKS[{DEFAULT_TASK_BACKEND_ALIAS!r}]: also takes the tasks of other apps: {names}",
            hint="Without a worker they never run, and failures are retried MAX_ATTEMPTS times; see "
            '"Tasks of other apps" in docs/reference/django-tasks.md.',
            id="django_faktory.I002",
        )
    ]


def _is_of_other_package(function: Any) -> bool:
    module = sys.modules.get(function.__module__)
    return str(getattr(module, "__file__", "")).startswith(_FOREIGN_FOLDERS)


# Only with `--deploy`: in development and tests these backends are appropriate.
@register(deploy=True)
def check_backends_for_production(**_: Any) -> list[CheckMessage]:
    """Warn about backends of `testing` in TASKS: they store no job."""
    return [
        Warning(
            f"TASKS[{alias!r}]: {params['BACKEND']} is for tests: no worker ever sees its jobs",
            hint=f'"BACKEND": "{OURS}"',
            id="django_faktory.W006",
        )
        for alias, params in _entries()
        if isinstance(params, Mapping) and params.get("BACKEND") in FOR_TESTS
    ]


def remedy_for(module: BrokenModule) -> str:
    """Return a remedy for a module that prevents a worker from starting."""
    if not any(is_faktory_entry(params) for _, params in _entries()):
        return f'no entry of TASKS uses FaktoryBackend: TASKS = {{"default": {{"BACKEND": "{OURS}", "QUEUES": []}}}}'
    return f"correct it, or remove {module.name.removesuffix('.tasks')} from INSTALLED_APPS"


def broken_modules() -> list[BrokenModule]:
    """Import the `tasks` module of each installed app; return the failing ones, in the apps' order."""
    return [BrokenModule(name, error, _place_of(error)) for name, error in import_tasks()]


def _place_of(error: Exception) -> str:
    """Return file and line of the innermost frame in the project's own code."""
    # A SyntaxError has no frame of its own: the traceback ends in importlib.
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
    project_frames = [frame for frame in frames if not frame.filename.startswith(_FOREIGN_FOLDERS)]
    innermost = (project_frames or frames)[-1]
    return f"{innermost.filename}, line {innermost.lineno}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _entries() -> Iterator[tuple[str, Any]]:
    tasks = getattr(settings, "TASKS", {})
    yield from tasks.items() if isinstance(tasks, Mapping) else ()


def _problem_with_backend(path: object) -> str:
    if path is None:
        return ""  # Django's own default
    if not isinstance(path, str):
        return f"expected the dotted path of a backend, got {path!r:.80}"
    try:
        import_string(path)
    except ImportError as error:
        return f"{path!r} cannot be imported: {_first_line(error)}"
    return ""


def is_faktory_entry(params: Any) -> bool:
    """Return whether an entry of TASKS uses FaktoryBackend or a subclass."""
    try:
        backend = import_string(params["BACKEND"])
    except (ImportError, KeyError, TypeError):
        return False
    return isinstance(backend, type) and issubclass(backend, FaktoryBackend)
