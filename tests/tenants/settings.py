"""Settings of the project with django-tenants. FAKTORY_TENANTS_LAYOUT selects the list of apps with django_faktory.

The code of docs/howto/multi-tenant.md is in the package `shop`, which the tests write into a folder of PYTHONPATH.
"""

import os
from pathlib import Path

from tests.settings import DATABASES as _DATABASES
from tests.settings import TEMPLATES as TEMPLATES  # noqa: PLC0414

LAYOUT = os.environ["FAKTORY_TENANTS_LAYOUT"]
DATABASES = {
    "default": {
        **_DATABASES["default"],
        "ENGINE": "django_tenants.postgresql_backend",
        "NAME": os.environ["FAKTORY_TENANTS_NAME"],
    }
}
DATABASE_ROUTERS = ("django_tenants.routers.TenantSyncRouter",)
_BOTH = ["django.contrib.contenttypes", "django.contrib.auth"]
SHARED_APPS = ["django_tenants", "tests.tenants.customers", *_BOTH]
TENANT_APPS = [
    *_BOTH,
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.admin",
    "tests.tenants.notes",
]
FAKTORY = {}

for _settings in sorted(Path(os.environ["FAKTORY_TENANTS_PAGE"]).glob("settings_*.py")):
    exec(_settings.read_text(), globals())  # the settings of the page, for this layout

FAKTORY = {**FAKTORY, "POLL_INTERVAL": 0.2, "BEAT_INTERVAL": 0.5}
INSTALLED_APPS = list(dict.fromkeys([*SHARED_APPS, *TENANT_APPS]))
TENANT_MODEL = "customers.Customer"
TENANT_DOMAIN_MODEL = "customers.Domain"
MIDDLEWARE = [
    "django_tenants.middleware.main.TenantMainMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
ROOT_URLCONF = "tests.tenants.urls"
ALLOWED_HOSTS = ["*"]
SECRET_KEY = "tests only"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
STATIC_URL = "/static/"
TASKS = {"default": {"BACKEND": "django_faktory.backend.FaktoryBackend", "QUEUES": []}}
