"""Test that the permission table of the security page equals `permissions`, and that Django has each permission."""

import re

import pytest
from django.contrib.auth.models import Permission

from django_faktory.models import permissions
from tests.docs.pages import section, text_of

pytestmark = pytest.mark.once


def rows():
    """Return the table's rows, by resource, as lists of cells."""
    page = section(text_of("security.md"), "## Who sees and does what")
    lines = re.findall(r"^\| `(\w+)` \|(.*)\|$", page, re.MULTILINE)
    return {resource: [cell.strip() for cell in cells.split("|")] for resource, cells in lines}


def codes(cell):
    return set(re.findall(r"`(\w+)`", cell))


def test_the_permission_table_has_each_resource():
    assert set(rows()) == {action.partition(".")[0] for action in permissions.ACTIONS}


@pytest.mark.parametrize("resource", sorted({action.partition(".")[0] for action in permissions.ACTIONS}))
def test_a_table_row_lists_each_action_and_field_with_its_permission(resource):
    view, actions, fields = rows()[resource]
    mine = {
        action.partition(".")[2]: codename
        for action, codename in permissions.ACTIONS.items()
        if action.startswith(f"{resource}.")
    }
    assert codes(view) == {mine.pop("view")}
    assert codes(actions) == set(mine.values())
    assert dict(re.findall(r"(\w+): `(\w+)`", fields)) == {
        field.partition(".")[2]: permissions.ACTIONS[needed]
        for field, needed in permissions.FIELDS.items()
        if field.startswith(f"{resource}.")
    }


@pytest.mark.django_db
def test_django_has_each_permission_of_the_policy():
    known = set(Permission.objects.filter(content_type__app_label=permissions.APP).values_list("codename", flat=True))
    assert set(permissions.ACTIONS.values()) <= known


def test_an_act_missing_from_the_policy_is_rejected():
    with pytest.raises(KeyError):
        permissions.needs("job.nonsense")
