"""System checks of TASKS: the backends exist, and the tasks modules can be imported."""

import sys

import pytest
from django.contrib.auth.hashers import check_password, make_password
from django.core.checks.registry import registry
from django.test import override_settings

from django_faktory.checks import tasks
from django_faktory.tasks import base

pytestmark = pytest.mark.once_if_quick

OURS = "django_faktory.backend.FaktoryBackend"


@pytest.mark.parametrize(
    ("path", "message", "hint"),
    [
        ("django_faktory.backends.FaktoryBackend", "No module named", OURS),
        ("django_faktory.backend.FactoryBackend", "does not define", OURS),
        ("django_faktory.testing.DummyBackend", "cannot be imported", "django_faktory.testing.backends.DummyBackend"),
        ("quite.another.one", "No module named 'quite'", OURS),
        (5, "expected the dotted path of a backend, got 5", OURS),
    ],
)
def test_a_missing_backend_is_an_error_that_suggests_the_right_path(path, message, hint):
    with override_settings(TASKS={"default": {"BACKEND": path}}):
        [found] = tasks.check_backends()
    assert (found.id, message in found.msg, hint in found.hint) == ("django_faktory.E014", True, True)


@pytest.mark.parametrize("entry", [{"BACKEND": OURS}, {}, {"BACKEND": tasks.FOR_TESTS[0]}])
def test_existing_backends_pass_the_check(entry):
    with override_settings(TASKS={"default": entry}):
        assert tasks.check_backends() == []


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("import no_such_thing\n", 1, "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("from django_faktory import task\n\n@task\ndef f():\n    yield\n", 3, "InvalidTask"),
        ("x = 1\ndef f(:\n    pass\n", 2, "SyntaxError"),
        ("def f():\n    raise KeyError('gone\\nand more')\n\nf()\n", 2, "KeyError"),
    ],
)
def test_a_broken_tasks_module_is_an_error_with_its_line(broken_app, text, line, message):
    file = broken_app(text)
    [found] = [one for one in tasks.check_tasks_modules() if "broken_app" in one.msg]
    assert found.id == "django_faktory.E015"
    assert found.msg.startswith("broken_app.tasks cannot be imported: ")
    assert message in found.msg
    assert found.msg.endswith(f"({file}, line {line})")
    assert "\n" not in found.msg


def test_tasks_modules_are_not_checked_with_another_backend(broken_app):
    broken_app("import no_such_thing\n")
    with override_settings(TASKS={"default": {"BACKEND": "quite.another.one"}}):
        assert tasks.check_tasks_modules() == []


def test_the_check_imports_valid_tasks_modules(broken_app):
    broken_app("loaded = True\n")
    tasks.check_tasks_modules()
    assert sys.modules["broken_app.tasks"].loaded


def test_the_apps_whose_tasks_the_default_backend_takes_are_named(monkeypatch):
    monkeypatch.setattr(base, "_registry", dict(base._registry))
    entry = {"BACKEND": OURS, "QUEUES": []}
    with override_settings(TASKS={"default": entry, "jobs": entry}):
        assert tasks.check_tasks_of_other_apps() == []
        base.task(name="other.hash")(make_password)
        base.task(name="other.jobs", backend="jobs")(check_password)
        [found] = tasks.check_tasks_of_other_apps()
    assert found.id == "django_faktory.I002"
    assert found.msg.endswith("takes the tasks of other apps: django.contrib.auth (1)")
    with override_settings(TASKS={"default": {"BACKEND": "quite.another.one"}}):
        assert tasks.check_tasks_of_other_apps() == []


@pytest.mark.parametrize("path", tasks.FOR_TESTS)
def test_a_test_backend_is_a_warning_in_deployment_checks(path):
    with override_settings(TASKS={"default": {"BACKEND": path, "QUEUES": []}}):
        [found] = tasks.check_backends_for_production()
    assert (found.id, found.hint) == ("django_faktory.W006", f'"BACKEND": "{OURS}"')
    assert tasks.check_backends_for_production() == []
    assert tasks.check_backends_for_production in registry.deployment_checks
    assert tasks.check_backends_for_production not in registry.registered_checks


def test_the_remedy_for_a_broken_module_mentions_a_missing_faktory_backend(broken_app):
    broken_app("import no_such_thing\n")
    [broken] = [one for one in tasks.broken_modules() if one.name == "broken_app.tasks"]
    assert tasks.remedy_for(broken) == "correct it, or remove broken_app from INSTALLED_APPS"
    with override_settings(TASKS={"default": {"BACKEND": "quite.another.one"}}):
        assert tasks.remedy_for(broken).startswith("no entry of TASKS uses FaktoryBackend: TASKS = {")
