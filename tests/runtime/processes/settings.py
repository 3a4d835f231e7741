"""Settings of the processes that the tests start: the test's database and the JSON in `FAKTORY_TEST_SETTINGS`."""

import json
import os
import resource
import sys

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES, INSTALLED_APPS

DATABASES["default"]["NAME"] = os.environ.get("FAKTORY_TEST_NAME", DATABASES["default"]["NAME"])
# The checks at the start would import the pages, the API and its schema: 0.5 s of CPU time in each process.
ROOT_URLCONF = __name__
urlpatterns: list[object] = []
INSTALLED_APPS = [name for name in INSTALLED_APPS if name not in ("rest_framework", "django_filters")]
# Without `autodiscover`, which would import all pages of the admin: a fifth of the start.
INSTALLED_APPS[INSTALLED_APPS.index("django.contrib.admin")] = "django.contrib.admin.apps.SimpleAdminConfig"
INSTALLED_APPS += ["tests.runtime.processes", *os.environ.get("FAKTORY_TEST_APPS", "").split()]
FAKTORY: dict[str, object] = json.loads(os.environ.get("FAKTORY_TEST_SETTINGS", "{}"))
DEBUG = "FAKTORY_TEST_DEBUG" in os.environ

if "FAKTORY_TEST_OPEN_FILES" in os.environ:
    soft, hard = map(int, os.environ["FAKTORY_TEST_OPEN_FILES"].split())
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

sys.path += os.environ.get("FAKTORY_TEST_PATH", "").split()
if "FAKTORY_TEST_LOGGING" in os.environ:
    LOGGING = {
        "version": 1,
        "formatters": {"theirs": {"format": "theirs: %(message)s"}},
        "handlers": {"theirs": {"class": "logging.StreamHandler", "formatter": "theirs"}},
        "root": {"handlers": ["theirs"], "level": "INFO"},
        "loggers": {
            name: {"level": "INFO"} for name in os.environ["FAKTORY_TEST_LOGGING"].split(",") if "tasks" in name
        },
    }
