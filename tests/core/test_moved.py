"""An import of a public module at its old place names the new place in one line."""

import importlib
import subprocess
import sys

import pytest
from django.core.checks import run_checks
from django.test import override_settings
from django.urls import include
from django.utils.module_loading import import_string

from django_faktory.moved import MOVED

OLD = sorted(MOVED)


@pytest.mark.parametrize("old", OLD)
def test_importing_an_old_module_path_raises_an_error_with_the_new_path(old):
    with pytest.raises(ImportError) as caught:
        importlib.import_module(old)
    assert str(caught.value) == f"{old} has moved: import {MOVED[old]}"


@pytest.mark.parametrize("old", OLD)
def test_every_new_module_path_can_be_imported(old):
    importlib.import_module(MOVED[old])


@pytest.mark.parametrize(
    "line",
    [
        "from django_faktory import limiting",
        "from django_faktory.limiting import pause",
        "import django_faktory.limiting",
    ],
)
def test_every_form_of_import_reports_the_new_path(line):
    program = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=False)
    assert (
        program.stderr.splitlines()[-1]
        == "ImportError: django_faktory.limiting has moved: import django_faktory.tasks.limits"
    )


def test_importing_from_a_moved_package_reports_the_new_package():
    line = r"^django_faktory\.metrics has moved: import django_faktory\.contrib\.metrics$"
    with pytest.raises(ImportError, match=line):
        import_string("django_faktory.metrics.opentelemetry.Spans")


def test_a_module_that_never_existed_raises_module_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'django_faktory\.nothing'"):
        importlib.import_module("django_faktory.nothing")


def test_including_urls_from_the_old_path_reports_the_new_path():
    with pytest.raises(ImportError, match=r"import django_faktory\.contrib\.api"):
        include("django_faktory.api.urls")


def test_the_middleware_check_reports_the_new_module_path():
    with override_settings(FAKTORY={"MIDDLEWARE": ["django_faktory.middleware.Language"]}):
        [found] = [one for one in run_checks() if "MIDDLEWARE" in one.msg]
    assert found.hint.startswith("django_faktory.middleware has moved: import django_faktory.tasks.middleware. ")


def test_the_old_name_of_a_function_is_answered_with_the_new_one():
    from django_faktory.tasks import redaction

    with pytest.raises(AttributeError, match="is called redact_arguments now"):
        redaction.shown("a.task", [])
