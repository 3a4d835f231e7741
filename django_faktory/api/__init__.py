"""The REST API: `path("api/", include("django_faktory.api.urls"))`. An extra: `pip install django-faktory[api]`.

Over the same verbs as the admin and the command line; asks for the permissions of `permissions`. Docs: docs/api.md.
"""

try:
    import django_filters as django_filters
    import drf_spectacular as drf_spectacular
    import rest_framework as rest_framework
except ImportError as error:
    raise ImportError(
        f"django_faktory.api: expected the packages of its extra, got no {error.name}; pip install django-faktory[api]"
    ) from error
