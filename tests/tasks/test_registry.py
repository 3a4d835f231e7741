"""Which tasks a worker knows, and under which name."""

import importlib
import subprocess
import sys

import pytest
from django.test import override_settings

from django_faktory import task
from django_faktory.backend import registered_queues
from django_faktory.errors import UnknownJobType
from django_faktory.tasks.base import autodiscover, lookup, new_task
from django_faktory.tasks.compat import InvalidTask
from tests.project import tasks
from tests.tasks import reloaded

pytestmark = pytest.mark.core


def first():
    pass


def second():
    pass


one_lambda, another_lambda = (lambda: 1), (lambda: 2)


def test_a_task_is_found_by_its_jobtype():
    assert lookup("tests.project.tasks.add") is tasks.add
    assert lookup("billing.charge") is tasks.charge


@pytest.mark.parametrize("jobtype", ["os.system", "tests.project.tasks.charge", "unknown.app.tasks", "", "\ud800"])
def test_an_unregistered_jobtype_is_refused(jobtype):
    with pytest.raises(UnknownJobType, match="no task is registered as"):
        lookup(jobtype)


def test_looking_a_jobtype_up_never_imports_the_module_it_names():
    with pytest.raises(UnknownJobType):
        lookup("tests.tasks.trap.task")
    assert "tests.tasks.trap" not in sys.modules


def test_a_copy_made_by_using_does_not_replace_the_registered_task():
    tasks.add.using(priority=9)
    assert lookup("tests.project.tasks.add") is tasks.add


def test_two_functions_under_one_name_are_refused():
    task(name="taken")(first)
    with pytest.raises(InvalidTask, match=r"test_registry\.second: the name 'taken' is already taken by .*first"):
        task(name="taken")(second)


def test_one_function_may_be_two_tasks_under_two_names():
    one, two = task(name="one of two")(first), task(name="two of two", retry_on=OSError)(first)
    assert lookup("one of two") is one
    assert lookup("two of two") is two


def test_one_name_with_different_failure_options_is_refused():
    task(name="ways to fail")(first)
    with pytest.raises(InvalidTask, match="already defined with other options"):
        task(name="ways to fail", retry_on=OSError)(first)


def test_a_reloaded_module_replaces_its_tasks():
    before = reloaded.changing
    importlib.reload(reloaded)
    assert lookup("tests.tasks.reloaded.changing") is reloaded.changing
    assert reloaded.changing.func is not before.func


def test_two_lambdas_need_distinct_task_names():
    new_task(func=one_lambda, name="a lambda")
    new_task(func=one_lambda)
    with pytest.raises(InvalidTask, match="already taken"):
        new_task(func=another_lambda)


def test_registered_queues_are_those_of_the_tasks_and_default():
    found = registered_queues()
    assert {"default", "mail"} <= set(found)
    assert list(found) == sorted(found)


def test_registered_queues_include_those_of_faktory_backends():
    ours = {"BACKEND": "django_faktory.backend.FaktoryBackend", "QUEUES": ["reports"]}
    with override_settings(TASKS={"default": {**ours, "QUEUES": []}, "second": ours}):
        assert {"default", "mail", "reports"} <= set(registered_queues())


def test_registered_queues_exclude_those_of_other_backends():
    module = "django_tasks" if tasks.noop.__class__.__mro__[1].__module__.startswith("django_tasks") else "django.tasks"
    with override_settings(TASKS={"default": {"BACKEND": f"{module}.backends.dummy.DummyBackend", "QUEUES": []}}):
        assert registered_queues() == ("default",)


def test_autodiscover_imports_the_tasks_of_installed_apps():
    code = (
        "import django; django.setup()\n"
        "from django_faktory.tasks.base import autodiscover, lookup\n"
        "import sys; assert 'tests.project.tasks' not in sys.modules\n"
        "autodiscover(); print(lookup('billing.charge').name)\n"
    )
    assert _python(code) == "charge"
    autodiscover()  # a second call changes nothing


def test_backend_and_decorator_can_be_imported_while_apps_still_load():
    """A models.py may decorate tasks, and then importing a model would fail."""
    code = (
        "import sys, django_faktory.backend, django_faktory.worker\n"
        "from django_faktory import task\n"
        "from django_faktory.tasks.base import FaktoryTask\n"
        "assert 'django_faktory.models' not in sys.modules\n"
        "def f(): pass\n"
        "f.__module__ = 'early'\n"
        "print(type(task(f)).__name__)\n"
    )
    assert _python(code) == "FaktoryTask"


def _python(code):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
