"""Test that each diagram of the pages is drawn, from its present text, with a title and a description."""

import re

import pytest

from scripts import diagrams
from tests.docs.pages import DOCS, name

pytestmark = pytest.mark.core

TEXTS = diagrams.texts()


@pytest.mark.parametrize("text", TEXTS, ids=diagrams.name_of)
def test_a_diagram_is_drawn_from_its_text(text):
    drawing = diagrams.path_of(text).read_text(encoding="utf-8")
    assert f'data-text="{diagrams.digest_of(text)}"' in drawing, "run: make diagrams"


@pytest.mark.parametrize("text", TEXTS, ids=diagrams.name_of)
def test_a_drawing_has_a_title_a_description_and_the_colours_of_the_page(text):
    drawing = diagrams.path_of(text).read_text(encoding="utf-8")
    labels = dict(re.findall(r"<(title|desc) [^>]*>([^<]+)</", drawing))
    assert f"accTitle: {labels['title']}\n" in text
    assert f"accDescr: {labels['desc']}\n" in text
    assert re.findall(r"(?:fill|stroke)=\"(?!none)[^\"]*\"", re.sub(r"<marker.*?</marker>", "", drawing)) == []


def test_no_drawing_is_left_over():
    assert sorted(diagrams.FOLDER.iterdir()) == sorted(map(diagrams.path_of, TEXTS))


def test_no_page_draws_with_characters():
    drawn = re.compile("[│▲▼]|──")
    assert [name(page) for page in DOCS.rglob("*.md") if drawn.search(page.read_text(encoding="utf-8"))] == []
