"""Settings of the test project. `FAKTORY_TEST_DB` selects the database: sqlite (default), postgresql, mariadb.

`FAKTORY_TEST_TAG` separates two runs of one checkout. `FAKTORY_TEST_ADMIN=unfold` or `jazzmin` selects a theme of the
admin, `FAKTORY_TEST_DRIVER=psycopg2` hides psycopg 3. `FAKTORY_TEST_VIA` selects what is between the tests and
PostgreSQL: bouncer, a PgBouncer at PGHOST and PGPORT (see tests/bouncer), or pool, Django's own.
"""

import os
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

TAG = os.environ.get("FAKTORY_TEST_TAG") or f"{zlib.crc32(__file__.encode()):08x}"
KIND = os.environ.get("FAKTORY_TEST_DB", "sqlite")
VIA = os.environ.get("FAKTORY_TEST_VIA", "")
POOL = int(os.environ.get("FAKTORY_TEST_POOL", "30"))
if os.environ.get("FAKTORY_TEST_DRIVER") == "psycopg2":
    sys.modules["psycopg"] = None  # type: ignore[assignment]  # as if it was not installed: Django uses psycopg2
SCRATCH = Path(tempfile.gettempdir()) / f"django_faktory_{TAG}"
SCRATCH.mkdir(mode=0o700, exist_ok=True)

DATABASES: dict[str, Any] = {
    "sqlite": {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": str(SCRATCH / "project.sqlite3"),
            "OPTIONS": {
                "transaction_mode": "IMMEDIATE",
                "timeout": 20,
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;",  # killed processes lose no data
            },
            "TEST": {"NAME": str(SCRATCH / "test.sqlite3")},
        }
    },
    "postgresql": {
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": "postgres",
            "HOST": os.environ.get("PGHOST", "127.0.0.1"),
            "PORT": os.environ.get("PGPORT", "5432"),
            "USER": os.environ.get("PGUSER", "postgres"),
            "PASSWORD": os.environ.get("PGPASSWORD", ""),
            "TEST": {"NAME": f"test_faktory_{TAG}"},
        }
    },
    "mariadb": {
        "default": {
            "ENGINE": "django.db.backends.mysql",
            "NAME": "test",
            "HOST": os.environ.get("MYSQL_HOST", "127.0.0.1"),
            "PORT": os.environ.get("MYSQL_PORT", "3306"),
            "USER": os.environ.get("MYSQL_USER", "root"),
            "PASSWORD": os.environ.get("MYSQL_PASSWORD", ""),
            "OPTIONS": {"charset": "utf8mb4", "isolation_level": "read committed"},
            "TEST": {"NAME": f"test_faktory_{TAG}", "CHARSET": "utf8mb4"},
        }
    },
}[KIND]


def _second(first: dict[str, Any]) -> dict[str, Any]:
    """Return a second database of the same kind, for jobs stored apart from the project's data."""
    name = first["TEST"]["NAME"]
    name = name.replace(".sqlite3", "_other.sqlite3") if KIND == "sqlite" else f"{name}_other"
    return {**first, "NAME": first["NAME"].replace("project.", "other."), "TEST": {**first["TEST"], "NAME": name}}


if VIA == "bouncer":  # Django's own rule; nothing else needs to be set
    DATABASES["default"]["DISABLE_SERVER_SIDE_CURSORS"] = True
elif VIA == "pool":
    DATABASES["default"]["OPTIONS"] = {"pool": {"min_size": 1, "max_size": POOL, "timeout": 10, "max_idle": 5}}

DATABASES["other"] = _second(DATABASES["default"])

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "rest_framework",
    "django_filters",
    "django_faktory",
    "tests.project",
    "example_project.shop",
]
MIDDLEWARE = [
    "tests.project.security.content_security_policy",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
if theme := os.environ.get("FAKTORY_TEST_ADMIN"):
    INSTALLED_APPS.insert(0, theme)
    MIDDLEWARE.pop(0)  # pages of these themes have inline scripts
    JAZZMIN_SETTINGS = {"use_google_fonts_cdn": False}
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
ROOT_URLCONF = "tests.project.urls"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # fast: each admin test creates a user
SECRET_KEY = "tests only"
MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}  # Django 6.1 requires it
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
STATIC_URL = "/static/"
TASKS = {"default": {"BACKEND": "django_faktory.backend.FaktoryBackend", "QUEUES": []}}
FAKTORY: dict[str, object] = {}
