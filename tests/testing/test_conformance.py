"""Test that docs/reference/django-tasks.md and `scripts/django_suite.py` agree about Django's own tests."""

import re
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "reference" / "django-tasks.md").read_text()
SUITE = runpy.run_path(str(ROOT / "scripts" / "django_suite.py"))


def listed(section):
    """Return (file, test) for each test that this part of the page lists."""
    found = set()
    for line in section.splitlines():
        file = re.match(r"\| `(test_\w+)` `", line)
        if file:
            found |= {(file[1], name) for name in re.findall(r"`(test_\w+)`", line)[1:]}
    return found


def held_to(variant):
    return {(name.partition(".")[0], name.rpartition(".")[2]) for name in variant.exceptions}


def test_the_page_lists_every_exception_of_the_script():
    for_tests, real = SUITE["VARIANTS"]
    first, second = PAGE.split("**With `FaktoryBackend` itself**")
    assert listed(first) == held_to(for_tests)
    assert listed(first) | listed(second) == held_to(real)


def test_all_spellings_of_djangos_backend_names_are_replaced():
    variant = SUITE["VARIANTS"][0]
    text = 'from django.tasks.backends.dummy import DummyBackend\n"django.tasks.backends.immediate.ImmediateBackend"\n'
    assert variant.rewritten(text) == (
        "from django_faktory.testing.backends import DummyBackend as DummyBackend\n"
        '"django_faktory.testing.backends.ImmediateBackend"\n'
    )
