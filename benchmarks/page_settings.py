"""Settings of `benchmarks.settings`, plus the admin and the API."""

from benchmarks.settings import *  # noqa: F403

INSTALLED_APPS = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.messages",
    "django.contrib.sessions", "django.contrib.staticfiles", "rest_framework", "django_filters", "django_faktory",
    "benchmarks",
]  # fmt: skip
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
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
ROOT_URLCONF = "benchmarks.page_urls"
STATIC_URL = "/static/"
ALLOWED_HOSTS = ["*"]
FAKTORY = {"API_READS": ""}
