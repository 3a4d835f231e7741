"""Fixtures: the pytest fixture as a project would define it, and settings with the test backends."""

import pytest
from django.test import override_settings

from django_faktory.tasks.compat import task_backends
from django_faktory.testing.pytest_plugin import live_faktory  # noqa: F401


@pytest.fixture
def tasks_setting():
    """Return a function that sets TASKS to a class of `django_faktory.testing.backends` and returns the backend."""
    overridden = []

    def use(name, **params):
        path = f"django_faktory.testing.backends.{name}"
        setting = override_settings(TASKS={"default": {"BACKEND": path, "QUEUES": [], **params}})
        setting.enable()
        overridden.append(setting)
        return task_backends["default"]

    yield use
    for setting in reversed(overridden):
        setting.disable()
