"""URLs with a second AdminSite at /ops/: alone, or with `admin.site`; and routers of databases."""

from typing import ClassVar

from django.contrib import admin
from django.contrib.auth.models import User
from django.urls import path

from example_project.shop.models import Order

APP = "django_faktory"
ops = admin.AdminSite(name="ops")
without_jobs = admin.AdminSite()
without_jobs.register(User)
for model, page in admin.site._registry.items():
    if model._meta.app_label == APP or model is Order:
        ops.register(model, type(page))


class Alone:
    """The jobs are on the second site only."""

    urlpatterns: ClassVar = [path("admin/", without_jobs.urls), path("ops/", ops.urls)]


class Both:
    """The jobs are on both sites."""

    urlpatterns: ClassVar = [path("admin/", admin.site.urls), path("ops/", ops.urls)]


class JobsElsewhere:
    """Keep everything of the app in `other`, except the outbox."""

    def _alias(self, model, **hints):
        is_job = model._meta.app_label == APP and model._meta.model_name != "outboxentry"
        return "other" if is_job else None

    db_for_read = db_for_write = _alias


class Replica:
    """Send reads to `other`, as if it were a replica, and writes to `default`."""

    def db_for_read(self, model, **hints):
        return "other" if model._meta.app_label == APP else None

    def db_for_write(self, model, **hints):
        return "default" if model._meta.app_label == APP else None
