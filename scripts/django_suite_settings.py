"""Settings with which `django_suite.py` runs Django's own tests of the Tasks framework."""

import os
from pathlib import Path

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
        "TEST": {"NAME": str(Path(os.environ["DJANGO_SUITE_FOLDER"]) / "test.sqlite3")},
    }
}
INSTALLED_APPS = ["django_faktory"]
SECRET_KEY = "tests only"
USE_TZ = True
TEST_RUNNER = "django_suite_support.Runner"
TASKS = {"default": {"BACKEND": "django_faktory.backend.FaktoryBackend", "QUEUES": []}}  # makes the tasks ours
FAKTORY = {"MAX_ATTEMPTS": 1}  # Django's tests expect one attempt, and a failure to be final
