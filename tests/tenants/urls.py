"""The admin, and a view that enqueues."""

from django.contrib import admin
from django.db import connection, transaction
from django.http import JsonResponse
from django.urls import path

from tests.tenants.notes.tasks import note


def enqueue(request):
    """Enqueue a job in autocommit and one in a transaction, and return the schema of the request."""
    words = [f"{connection.schema_name}-{place}" for place in ("autocommit", "atomic")]
    note.enqueue(words[0])
    with transaction.atomic():
        note.enqueue(words[1])
    return JsonResponse({"schema": connection.schema_name})


urlpatterns = [path("admin/", admin.site.urls), path("enqueue/", enqueue)]
