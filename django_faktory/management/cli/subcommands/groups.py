"""`groups`: create a group of users for each role, with the permissions of that role."""

from __future__ import annotations

from django.apps import apps
from django.db import transaction

from ....models.permissions import APP, ROLES
from ..screen import quantity
from ..subcommand import OK, Invocation, Unsupported, subcommand


@subcommand("groups", "Create the groups of viewers, operators and administrators, or update their permissions.")
def _groups(call: Invocation) -> int:
    if not apps.is_installed("django.contrib.auth"):
        raise Unsupported("groups: needs django.contrib.auth in INSTALLED_APPS")
    from django.contrib.auth.models import Group, Permission  # only if the app is installed

    added_by_role: dict[str, int] = {}
    with transaction.atomic(using=Group.objects.db):
        for name, codenames in ROLES.items():
            group, _ = Group.objects.get_or_create(name=name)
            permissions = Permission.objects.filter(content_type__app_label=APP, codename__in=codenames)
            present = set(group.permissions.values_list("pk", flat=True))
            new = [permission for permission in permissions if permission.pk not in present]
            group.permissions.add(*new)
            added_by_role[name] = len(new)
    if call.screen.is_json:
        call.screen.json({"groups": [{"name": name, "added": added} for name, added in added_by_role.items()]})
    else:
        for name, added in added_by_role.items():
            call.screen.line(f"{name}: {quantity(added, 'permission')} added")
    return OK
