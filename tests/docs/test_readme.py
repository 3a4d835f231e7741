"""Test that figures in README equal the measured ones, and that versions equal those in the package metadata."""

import re
import tomllib

import pytest

from tests.docs.pages import ROOT, section, text_of

pytestmark = pytest.mark.core

README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTEBOOK = (ROOT / "benchmarks" / "NOTEBOOK.md").read_text(encoding="utf-8")


def rows(text):
    """Yield the cells of each table row, without bold marks and numbers in parentheses."""
    for line in re.findall(r"^\|(.*)\|$", text, flags=re.MULTILINE):
        yield [re.sub(r" \([\d.]+\)|\*\*", "", cell).strip() for cell in line.split("|")]


def test_benchmark_figures_equal_the_measured_ones():
    head, _, *shown = rows(section(README, "## How fast"))
    columns, _, *measured = rows(section(NOTEBOOK, "## Beside its peers"))
    places = [columns.index(name) for name in head]
    known = {row[0]: [row[place] for place in places] for row in measured}
    assert len(shown) >= 5
    assert shown == [known[row[0]] for row in shown]


def test_the_quickstart_lists_each_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shown = [
        name for row in rows(section(text_of("quickstart.md"), "## Extras")) for name in re.findall(r"`(\w+)`", row[0])
    ]
    assert sorted(shown) == sorted(project["optional-dependencies"])


def test_supported_versions_equal_the_package_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = " ".join(project["classifiers"])
    supported = section(README, "## Supported")
    for django in re.findall(r"Framework :: Django :: ([\d.]+)", declared):
        assert django in supported
    assert project["requires-python"] == ">=" + re.search(r"Python ([\d.]+) to", supported)[1]
