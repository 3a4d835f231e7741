"""Check that every verb of the server is attacked, so that a new verb needs an attack."""

import pytest

from django_faktory.server.handlers.jobs import VERBS
from tests.attacks.inputs import ATTACKS

pytestmark = pytest.mark.core


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_each_verb_has_a_permitted_and_a_refused_costly_input(verb):
    assert {attack.is_legal for attack in ATTACKS if attack.verb is verb} == {True, False}


def test_each_attack_has_a_unique_name():
    assert len({str(attack) for attack in ATTACKS}) == len(ATTACKS)
