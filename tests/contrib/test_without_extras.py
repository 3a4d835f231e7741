"""Without the packages of an extra everything else works, and what needs it raises one line that names the extra."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.core]

ROOT = Path(__file__).resolve().parents[2]
HIDING = """
import importlib, pkgutil, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import django
from django.conf import settings
settings.configure(
    SECRET_KEY="x",
    INSTALLED_APPS=[f"django.contrib.{app}" for app in ("admin", "auth", "contenttypes", "messages", "sessions")]
    + ["django_faktory"],
    DATABASES={"default": {"ENGINE": f"django.db.backends.{DATABASE}", "NAME": ":memory:"}},
    TASKS={"default": {"BACKEND": "django_faktory.backend.FaktoryBackend", "QUEUES": []}},
    MIDDLEWARE=[],
    USE_TZ=True,
)
django.setup()
"""
WORKS = """
import django_faktory
from django.core.management import call_command
api = tuple(f"django_faktory.contrib.{name}" for name in ("api", "metrics.opentelemetry", "metrics.prometheus"))
for found in pkgutil.walk_packages(django_faktory.__path__, "django_faktory.", onerror=lambda name: None):
    if not found.name.startswith((*api, "django_faktory.testing")):
        importlib.import_module(found.name)
call_command("migrate", verbosity=0)
call_command("faktory", "jobs", "--json")
assert not HIDDEN & {name.partition(".")[0] for name in sys.modules}
"""
EXTRAS = {"rest_framework", "django_filters", "drf_spectacular", "opentelemetry", "prometheus_client", "rich"}


def run(code, *hidden, database="sqlite3"):
    command = [sys.executable, "-c", f"HIDDEN, DATABASE = {set(hidden)}, {database!r}\n{HIDING}{code}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_the_app_works_without_the_packages_of_its_extras():
    done = run(WORKS, *EXTRAS)
    assert done.returncode == 0, done.stderr
    assert '"jobs": []' in done.stdout


@pytest.mark.parametrize(
    ("module", "package", "extra", "name"),
    [
        ("api.urls", "django_filters", "api", "django_faktory.contrib.api: django_filters"),
        (
            "metrics.prometheus",
            "prometheus_client",
            "metrics",
            "django_faktory.contrib.metrics.prometheus: prometheus-client",
        ),
        (
            "metrics.opentelemetry",
            "opentelemetry",
            "metrics",
            "django_faktory.contrib.metrics.opentelemetry: opentelemetry-api",
        ),
    ],
)
def test_a_module_whose_package_is_missing_names_the_extra(module, package, extra, name):
    done = run(f"import django_faktory.contrib.{module}", package)
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1] == f'ImportError: {name} is not installed: pip install "django-faktory[{extra}]"'
    )


@pytest.mark.parametrize(
    ("database", "drivers", "line"),
    [
        ("postgresql", ("psycopg", "psycopg2"), 'psycopg is not installed: pip install "django-faktory[postgres]"'),
        ("mysql", ("MySQLdb",), 'mysqlclient is not installed: pip install "django-faktory[mysql]"'),
    ],
)
def test_a_missing_database_driver_names_the_extra(database, drivers, line):
    """A misspelt extra, such as [postgre], is only a warning of pip."""
    done = run("", *drivers, database=database)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"django.core.exceptions.ImproperlyConfigured: DATABASES['default']: {line}"
