"""Test the built site of the documentation in a browser: people can use it on a phone, and with a screen reader."""

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from tests.browser.test_pages import COLOUR_RULES, RUN_AXE, STICKS_OUT
from tests.docs import site

pytestmark = [pytest.mark.slow, pytest.mark.core]

MAIN = (
    "index", "quickstart", "tutorial", "cheatsheet", "faq", "tasks", "howto/retries", "explanation/job-life",
    "architecture", "reference/python", "reference/api", "reference/settings", "search.html?q=timout",
)  # fmt: skip
CARDS = """() => [...document.querySelectorAll('table td')].filter((cell) => cell.checkVisibility()).map((cell) => ({
wide: cell.getBoundingClientRect().width / cell.closest('table').getBoundingClientRect().width,
heading: getComputedStyle(cell, '::before').content.slice(1, -1), column: cell.dataset.heading,
isFirst: cell.matches(':first-child')}))"""
DIAGRAM = """() => { const text = document.querySelector('.diagram text');
return [getComputedStyle(text).fill, getComputedStyle(document.body).color]; }"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        """Log nothing."""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Build the site, and serve it."""
    folder = tmp_path_factory.mktemp("site")
    site.build(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def page(chromium, address):
    """Return a function that opens a page of the site in a window of this width."""
    context = chromium.new_context()
    window = context.new_page()

    def go(name, *, width):
        window.set_viewport_size({"width": width, "height": 900})
        assert window.goto(f"{address}/{name if '?' in name else f'{name}.html'}").status == 200
        return window

    yield go
    context.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_on_the_main_pages(page, axe_script, width):
    found = {}
    for name in MAIN:
        window = page(name, width=width)
        window.evaluate(axe_script.read_text())
        for theme in ("light", "dark"):
            window.emulate_media(color_scheme=theme)
            rules = None if theme == "light" else COLOUR_RULES
            found[f"{name}, {theme}"] = window.evaluate(RUN_AXE, [[], rules])
    assert {name: problems for name, problems in found.items() if problems} == {}


def test_tables_are_cards_on_a_phone(page):
    for name in ("tasks", "reference/api", "reference/settings", "howto/from-celery"):
        window = page(name, width=390)
        cells = window.evaluate(CARDS)
        assert min(cell["wide"] for cell in cells) > 0.9
        assert [cell for cell in cells if not cell["isFirst"] and cell["heading"] != cell["column"]] == []
        assert window.evaluate(STICKS_OUT) <= 0, name


def test_tables_are_tables_on_a_desk(page):
    cells = page("reference/settings", width=1280).evaluate(CARDS)
    assert max(cell["wide"] for cell in cells) < 0.9


def test_diagrams_have_the_colours_of_the_page(page):
    window = page("explanation/job-life", width=1280)
    colours = set()
    for theme in ("light", "dark"):
        window.emulate_media(color_scheme=theme)
        of_diagram, of_page = window.evaluate(DIAGRAM)
        assert of_diagram == of_page
        colours.add(of_page)
    assert len(colours) == 2


def test_a_misspelt_search_leads_to_what_was_meant(page):
    window = page("search.html?q=timout", width=1280)
    window.get_by_role("link", name="timeout", exact=True).click()
    window.locator("#search-results li a").first.wait_for()
    assert window.locator("#search-results li a").first.inner_text() == "Cheat sheet"
    assert not window.get_by_text("Did you mean").is_visible()
