"""The tables that select the tests of `make test` name tests that exist."""

import re
from pathlib import Path, PurePosixPath

import pytest

from tests import selection

pytestmark = pytest.mark.core

TESTS = Path(__file__).parent.parent
TABLES = {
    name: getattr(selection, name) for name in ("SLOW", "QUICK", "CORE", "ONCE", "ONCE_IF_QUICK", "EACH", "LINTED")
}


@pytest.mark.parametrize(("table", "entry"), [(name, entry) for name, table in TABLES.items() for entry in table])
def test_each_table_entry_names_existing_tests(table, entry):
    path, _, name = entry.partition("::")
    assert (TESTS / path).exists()
    assert not name or re.search(rf"def {name}\(", (TESTS / path).read_text(encoding="utf-8"))


def test_exceptions_are_inside_the_folders_they_exempt():
    each = (*selection.ONCE_IF_QUICK, *selection.PORTABLE)
    for exceptions, table in ((selection.QUICK, selection.SLOW), (selection.EACH, each)):
        for entry in exceptions:
            path = PurePosixPath(entry.partition("::")[0])
            assert {place.as_posix() for place in (path, *path.parents)} & set(table), entry


@pytest.mark.parametrize(
    ("path", "markers", "expected"),
    [
        ("soak", ["slow"], True),
        ("soak/test_kill.py", ["slow"], True),
        ("soak", [], False),
        ("deploys", ["slow"], True),
        ("deploys/test_two_versions.py", ["slow"], True),
        ("outside/test_outside.py", ["slow"], True),
        ("server/test_limits.py", ["slow"], False),
        ("worker/test_idle.py", ["once_if_quick"], True),
        ("worker/test_limits.py", ["once_if_quick"], False),
        ("store/jobs/test_scan.py", ["portable"], True),
        ("models/test_querysets.py", ["portable"], False),
        ("docs/test_links.py", ["core", "once"], True),
        ("core", ["core", "once"], True),
        ("store", ["core", "once", "once_if_quick", "slow"], False),
    ],
)
def test_files_are_not_imported_if_none_of_their_tests_runs(path, markers, expected):
    assert selection.is_left_out(TESTS / path, TESTS, markers) is expected


@pytest.mark.parametrize(
    ("kind", "is_first", "is_quick", "expected"),
    [
        ("sqlite", True, True, {"linted", "slow"}),
        ("postgresql", False, True, {"core", "linted", "once", "once_if_quick", "slow"}),
        ("mariadb", False, True, {"core", "linted", "once", "once_if_quick", "portable", "slow"}),
        ("mariadb", True, True, {"linted", "slow"}),
        ("sqlite", True, False, {"linted"}),
        ("mariadb", False, False, {"core", "linted", "once"}),
    ],
)
def test_each_database_skips_only_what_another_one_runs(kind, is_first, is_quick, expected):
    assert set(selection.left_out(kind, is_first=is_first, is_quick=is_quick)) == expected
