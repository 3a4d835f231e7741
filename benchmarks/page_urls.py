"""URLs that `benchmarks.pages` requests."""

from django.contrib import admin
from django.urls import include, path

from django_faktory.contrib.metrics.views import metrics

urlpatterns = [
    path("admin/", admin.site.urls),
    path("api/", include("django_faktory.contrib.api.urls")),
    path("metrics/", metrics),
]
