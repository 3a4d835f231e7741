"""URLs that `benchmarks.pages` requests."""

from django.contrib import admin
from django.urls import include, path

urlpatterns = [path("admin/", admin.site.urls), path("api/", include("django_faktory.contrib.api.urls"))]
