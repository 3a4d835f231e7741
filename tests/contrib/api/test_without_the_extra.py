"""Without the packages of the extra, everything else works, and including the API raises an error with instructions."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.core]

ROOT = Path(__file__).resolve().parents[3]
HIDING = """
import importlib, pkgutil, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rest_framework", "django_filters", "drf_spectacular"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import django
from django.conf import settings
settings.configure(
    SECRET_KEY="x",
    INSTALLED_APPS=[f"django.contrib.{app}" for app in ("admin", "auth", "contenttypes", "messages", "sessions")]
    + ["django_faktory"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    TASKS={"default": {"BACKEND": "django_faktory.backend.FaktoryBackend", "QUEUES": []}},
    MIDDLEWARE=[],
    USE_TZ=True,
)
django.setup()
"""
WORKS = """
import django_faktory
from django.core.management import call_command
for found in pkgutil.walk_packages(django_faktory.__path__, "django_faktory.", onerror=lambda name: None):
    if not found.name.startswith(("django_faktory.contrib.api", "django_faktory.testing")):
        importlib.import_module(found.name)
call_command("migrate", verbosity=0)
call_command("faktory", "jobs", "--json")
assert not any(name.startswith("rest_framework") for name in sys.modules)
"""


def run(code):
    return subprocess.run(
        [sys.executable, "-c", HIDING + code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_app_works_without_the_packages_of_the_api_extra():
    done = run(WORKS)
    assert done.returncode == 0, done.stderr
    assert '"jobs": []' in done.stdout


def test_importing_the_api_without_its_extra_names_the_package_to_install():
    done = run("import django_faktory.contrib.api.urls")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: django_faktory.contrib.api: expected the packages of its extra, got no django_filters; "
        "pip install django-faktory[api]"
    )
