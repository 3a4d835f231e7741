"""Settings of the programs of a rollout: few apps, all known to old releases; otherwise the tests' settings."""

import json
import os

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES

DATABASES["default"]["NAME"] = os.environ["FAKTORY_TEST_NAME"]
INSTALLED_APPS = ["django_faktory", "tests.deploys"]
MIDDLEWARE: list[str] = []
FAKTORY: dict[str, object] = json.loads(os.environ.get("FAKTORY_TEST_SETTINGS", "{}"))
ROOT_URLCONF = "tests.deploys.settings"
urlpatterns: list[object] = []
