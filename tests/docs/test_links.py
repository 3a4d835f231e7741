"""Test that links lead to existing files and headings, both on a forge and on the site."""

import re
import subprocess
import tomllib

import pytest

from tests.docs.pages import DOCS, ROOT, anchors, name, pages, text_of, without_fences

pytestmark = pytest.mark.core

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
LINK = re.compile(r"!?\[(?:[^\]]|\n)*?\]\(([^)\s]+)\)")


def links():
    for page in pages():
        for target in LINK.findall(without_fences(page.read_text(encoding="utf-8"))):
            if not re.match(r"[a-z]+:", target):
                path, _, anchor = target.partition("#")
                yield page, target, (page.parent / path).resolve() if path else page, anchor


def test_each_relative_link_points_to_an_existing_file():
    assert [f"{name(page)}: {target}" for page, target, path, _ in links() if not path.exists()] == []


def test_each_link_anchor_points_to_an_existing_heading():
    known = {path: anchors(path) for _, _, path, anchor in links() if anchor and path.suffix == ".md"}
    lost = [f"{name(page)}: {target}" for page, target, path, anchor in links() if anchor and anchor not in known[path]]
    assert lost == []


def test_the_address_of_the_project_is_in_one_place():
    """Every absolute link to it is derived, by hatch_build.py and docs/conf.py."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = {path: (ROOT / path).read_bytes().decode(errors="ignore") for path in listed if (ROOT / path).is_file()}
    ours = re.compile(rf"{re.escape(REPOSITORY)}|https?://[^\s)\"'<>]*/django[-_]faktory", re.IGNORECASE)
    found = [(path, link) for path, text in texts.items() for link in ours.findall(text)]
    assert found == [("pyproject.toml", REPOSITORY)]


def test_each_decision_named_in_the_code_exists():
    known = {path.name[:4] for path in (DOCS / "adr").glob("0*.md")}
    paths = [path for folder in ("django_faktory", "tests") for path in (ROOT / folder).rglob("*")]
    texts = {path: path.read_text(encoding="utf-8") for path in paths if path.suffix in (".py", ".sql")}
    named = {(name(path), number) for path, text in texts.items() for number in re.findall(r"ADR (\d{4})", text)}
    assert len(named) > 100
    assert sorted(one for one in named if one[1] not in known) == []


@pytest.mark.parametrize("folder", ["", "adr"])
def test_each_front_page_lists_each_page_once(folder):
    """The navigation of the documentation, and of the design decisions, is generated from its front page."""
    place = DOCS / folder
    listed = re.findall(r"^- \[[^\]]+\]\(([^)#\s]+\.md)\)", text_of(folder, "index.md"), flags=re.MULTILINE)
    there = {path.relative_to(place).as_posix() for path in place.rglob("*.md")} - {"index.md"}
    assert sorted(listed) == sorted(path for path in there if not path.startswith("adr/"))


def test_a_page_begins_with_its_only_title():
    for page in DOCS.rglob("*.md"):
        titles = re.findall(r"^# .+", without_fences(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
        assert len(titles) == 1, name(page)
        assert page.read_text(encoding="utf-8").startswith(titles[0]), name(page)


SOUGHT = ("delay", "retry", "timeout", "cancel", "troubleshooting", "faq", "upgrade", "cheat sheet", "progress")


@pytest.mark.parametrize("words", SOUGHT)
def test_words_that_users_search_are_a_heading(words):
    """Sphinx' search ranks a title that equals the query first."""
    headings = [line for page in DOCS.rglob("*.md") for line in without_fences(page.read_text()).splitlines()]
    assert [line for line in headings if re.fullmatch(rf"#+ {words}", line, re.IGNORECASE)]
