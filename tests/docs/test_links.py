"""Test that links lead to existing files and headings, both on a forge and on the site."""

import re

import pytest

from tests.docs.pages import DOCS, anchors, name, pages, text_of, without_fences

pytestmark = pytest.mark.core

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


def test_the_front_page_lists_each_page_once():
    """The site's navigation is generated from the front page."""
    listed = re.findall(r"^- \[[^\]]+\]\(([^)#\s]+\.md)\)", text_of("index.md"), flags=re.MULTILINE)
    there = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if path != DOCS / "index.md"]
    assert sorted(listed) == sorted(there)


def test_a_page_begins_with_its_only_title():
    for page in DOCS.rglob("*.md"):
        titles = re.findall(r"^# .+", without_fences(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
        assert len(titles) == 1, name(page)
        assert page.read_text(encoding="utf-8").startswith(titles[0]), name(page)
