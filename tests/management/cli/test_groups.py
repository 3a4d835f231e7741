"""`faktory groups`: groups with the permissions of each role."""

import pytest
from django.contrib.auth.models import Group, Permission, User

from django_faktory.models.permissions import APP, ROLES, may

pytestmark = [pytest.mark.django_db, pytest.mark.once]


def test_each_role_gets_its_permissions_and_all_of_them_exist(faktory):
    assert faktory("groups").code == 0
    for name, codenames in ROLES.items():
        assert set(Group.objects.get(name=name).permissions.values_list("codename", flat=True)) == set(codenames)


def test_operators_act_but_remove_no_job(faktory):
    faktory("groups")
    user = User.objects.create_user("operator")
    user.groups.add(Group.objects.get(name="Faktory operators"))
    assert may(user, "job.retry")
    assert may(user, "queue.pause")
    assert may(user, "job.view")
    assert not any(may(user, act) for act in ("job.discard", "job.prune", "job.kill", "queue.clear", "limit.delete"))


def test_a_second_run_restores_permissions_and_keeps_added_ones(asked, faktory):
    faktory("groups")
    viewers = Group.objects.get(name="Faktory viewers")
    retry = Permission.objects.get(content_type__app_label=APP, codename="retry_job")
    viewers.permissions.remove(viewers.permissions.first())
    viewers.permissions.add(retry)
    counts = {one["name"]: one["added"] for one in asked("groups")["groups"]}
    assert counts == {"Faktory viewers": 1, "Faktory operators": 0, "Faktory administrators": 0}
    assert retry in viewers.permissions.all()
    assert Group.objects.count() == 3
