"""REST API of the jobs, an optional extra: `pip install "django-faktory[api]"`.

Mount it with `path("api/", include("django_faktory.contrib.api.urls"))`. It uses the same operations as the admin and
the command line and checks the permissions of `models.permissions`. Docs: docs/reference/api.md.
"""

from ...core.extras import explain_missing

try:
    # Imported only to check that they are installed; `as` marks the unused names as intended.
    import django_filters as django_filters
    import drf_spectacular as drf_spectacular
    import rest_framework as rest_framework
except ImportError as error:
    raise ImportError(explain_missing(__name__, str(error.name), "api")) from error
