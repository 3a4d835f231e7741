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
def test_an_old_place_is_answered_with_the_new_one(old):
    with pytest.raises(ImportError) as caught:
        importlib.import_module(old)
    assert str(caught.value) == f"{old} has moved: import {MOVED[old]}"


@pytest.mark.parametrize("old", OLD)
def test_the_new_place_exists(old):
    importlib.import_module(MOVED[old])


@pytest.mark.parametrize(
    "line",
    [
        "from django_faktory import limiting",
        "from django_faktory.limiting import pause",
        "import django_faktory.limiting",
    ],
)
def test_every_form_of_import_is_answered(line):
    program = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=False)
    assert (
        program.stderr.splitlines()[-1]
        == "ImportError: django_faktory.limiting has moved: import django_faktory.tasks.limits"
    )


def test_a_module_of_a_package_that_has_moved_is_answered_with_the_package():
    line = r"^django_faktory\.metrics has moved: import django_faktory\.contrib\.metrics$"
    with pytest.raises(ImportError, match=line):
        import_string("django_faktory.metrics.opentelemetry.Spans")


def test_an_unknown_module_is_not_found_if_it_never_was():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'django_faktory\.nothing'"):
        importlib.import_module("django_faktory.nothing")


def test_urls_at_the_old_place_are_answered():
    with pytest.raises(ImportError, match=r"import django_faktory\.contrib\.api"):
        include("django_faktory.api.urls")


def test_the_check_of_middleware_names_the_new_place():
    with override_settings(FAKTORY={"MIDDLEWARE": ["django_faktory.middleware.Language"]}):
        [found] = [one for one in run_checks() if "MIDDLEWARE" in one.msg]
    assert found.hint.startswith("django_faktory.middleware has moved: import django_faktory.tasks.middleware. ")
