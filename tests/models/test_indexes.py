"""Indexes of the models on databases that support only parts of them."""

import pytest
from django.apps import apps
from django.core.checks import run_checks


@pytest.mark.django_db
def test_django_warns_of_no_index_whose_missing_part_has_a_substitute():
    found = run_checks([apps.get_app_config("django_faktory")], tags=["models"], databases=["default"])
    assert found == []
