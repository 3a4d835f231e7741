"""The tables that select the tests of `make test` name tests that exist."""

import re
from pathlib import Path, PurePosixPath

import pytest

from tests import selection

pytestmark = pytest.mark.core

TESTS = Path(__file__).parent.parent
TABLES = {name: getattr(selection, name) for name in ("SLOW", "QUICK", "CORE", "ONCE", "ONCE_IF_QUICK", "EACH")}


@pytest.mark.parametrize(("table", "entry"), [(name, entry) for name, table in TABLES.items() for entry in table])
def test_each_table_entry_names_existing_tests(table, entry):
    path, _, name = entry.partition("::")
    assert (TESTS / path).exists()
    assert not name or re.search(rf"def {name}\(", (TESTS / path).read_text(encoding="utf-8"))


def test_exceptions_are_inside_the_folders_they_exempt():
    for exceptions, table in ((selection.QUICK, selection.SLOW), (selection.EACH, selection.ONCE_IF_QUICK)):
        for entry in exceptions:
            path = PurePosixPath(entry.partition("::")[0])
            assert {place.as_posix() for place in (path, *path.parents)} & set(table), entry
