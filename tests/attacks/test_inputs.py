"""Check that every verb of the server is attacked, and that the page of measurements lists each attack."""

import re

import pytest

from django_faktory.server.handlers.jobs import VERBS
from tests.attacks.inputs import ATTACKS
from tests.docs.pages import ROOT, section

pytestmark = pytest.mark.core


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_each_verb_has_a_permitted_and_a_refused_costly_input(verb):
    assert {attack.is_legal for attack in ATTACKS if attack.verb is verb} == {True, False}


def test_each_attack_has_a_unique_name():
    assert len({str(attack) for attack in ATTACKS}) == len(ATTACKS)


def test_the_page_of_measurements_has_one_row_for_each_attack():
    page = (ROOT / "benchmarks" / "ATTACKS.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (\w+) \| ([^|]+) \|", section(page, "## Each verb with its costliest inputs"), flags=re.MULTILINE
    )
    assert [f"{verb}: {name}" for verb, name in rows[1:]] == [
        str(attack) if attack.is_legal else f"{attack} (refused)" for attack in ATTACKS
    ]
