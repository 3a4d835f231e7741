"""Test that each promise of the threat model names the tests that check it, and that they exist."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def promises():
    """Return the rows of the table: a promise, and the cell that names its tests."""
    page = (ROOT / "docs/security.md").read_text()
    table = page.partition("| promise | test |\n|---|---|\n")[2].partition("\n\n")[0]
    return [row.strip("|").rpartition(" | ")[::2] for row in table.splitlines()]


def names_in(path):
    """Return the names of all functions in a module."""
    tree = ast.parse((ROOT / path).read_text())
    return {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize(("promise", "cell"), promises(), ids=[promise[:60] for promise, _ in promises()])
def test_a_promise_names_tests_that_exist(promise, cell):
    named = NAMED.findall(cell)
    assert named
    assert cell.strip() == ", ".join(f"`{path}::{name}`" for path, name in named)
    assert [f"{path}::{name}" for path, name in named if name not in names_in(path)] == []
