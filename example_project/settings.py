"""Settings of the example project. It uses SQLite unless DATABASE_URL names another database.

DATABASE_URL   such as postgres://user@127.0.0.1:5432/shop or mysql://user@127.0.0.1:3306/shop
REDIS_URL      such as redis://127.0.0.1:6379/0: Django's cache, shared by all processes
SHOP_URL       base URL of this project's own pages, for its webhook
"""

import os
from pathlib import Path

import dj_database_url
import django

HERE = Path(__file__).resolve().parent

SECRET_KEY = os.environ.get("SECRET_KEY", "for the example project on this machine only")
DEBUG = True
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "[::1]"]

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
    "example_project.shop",
]
MIDDLEWARE = [
    "django_faktory.tasks.tracing.request_context",
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
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
ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"

DATABASES = {"default": dj_database_url.config(default=f"sqlite:///{HERE / 'db.sqlite3'}")}
DATABASES["default"]["OPTIONS"] = {
    **DATABASES["default"].get("OPTIONS", {}),
    **{
        # Workers need these settings of SQLite: writers wait instead of failing, and readers never wait.
        "django.db.backends.sqlite3": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
        "django.db.backends.mysql": {"charset": "utf8mb4", "isolation_level": "read committed"},
    }.get(DATABASES["default"]["ENGINE"], {}),
}

REDIS_URL = os.environ.get("REDIS_URL")
if REDIS_URL:
    CACHES = {"default": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": REDIS_URL}}

TASKS = {"default": {"BACKEND": "django_faktory.backend.FaktoryBackend", "QUEUES": []}}
# Tasks run with the language, time zone and request id of the code that enqueued them.
FAKTORY = {
    # Set by the deployment, for example to the commit: failed attempts name it in the admin.
    "RELEASE": os.environ.get("RELEASE", ""),
    "MIDDLEWARE": [f"django_faktory.tasks.middleware.{name}" for name in ("Language", "TimeZone", "Trace")],
    # Once a year, for a worker in another language: no worker here runs it. The daily report is in shop/tasks.py.
    "CRON": {
        "year's end": {
            "schedule": "0 9 31 12 *",
            "zone": "Europe/Berlin",
            "jobtype": "accounts.close_year",
            "queue": "accounts",
            "job": {"retry": 3, "custom": {"expires_in": 86_400}},
        }
    },
}

# Mail goes to the console. Django 6.1 has another setting for it.
if django.VERSION >= (6, 1):
    MAILERS = {"default": {"BACKEND": "django.core.mail.backends.console.EmailBackend"}}
else:
    EMAIL_BACKEND = "django.core.mail.backends.console.EmailBackend"
DEFAULT_FROM_EMAIL = "shop@example.org"
SHOP_URL = os.environ.get("SHOP_URL", "http://127.0.0.1:8000")

USE_TZ = True
TIME_ZONE = "UTC"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
