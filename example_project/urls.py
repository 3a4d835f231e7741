"""The shop at /, the admin with jobs, queues and workers at /admin/, the REST API at /api/."""

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("api/", include("django_faktory.contrib.api.urls")),
    path("", include("example_project.shop.urls")),
]
