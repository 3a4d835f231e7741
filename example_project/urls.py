"""The shop at /, the admin with jobs, queues and workers at /admin/."""

from django.contrib import admin
from django.urls import include, path

urlpatterns = [path("admin/", admin.site.urls), path("", include("example_project.shop.urls"))]
