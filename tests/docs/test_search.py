"""Test the search of the built site: it runs with Sphinx' own scripts, in node."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs import site

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
]

SOUGHT = {
    "delay": "recipes/delay-and-cancel",
    "retry": "howto/retries",
    "timeout": "tasks",
    "cancel": "recipes/delay-and-cancel",
    "troubleshooting": "troubleshooting",
    "faq": "faq",
    "upgrade": "upgrade",
    "cheat sheet": "cheatsheet",
    "cron": "cron",
    "rate limit": "limits",
    "webhook": "recipes/webhook",
}
"""A page that the first three hits must have."""

MISSPELT = {
    "dealy": "delay",
    "timout": "timeout",
    "cancle": "cancel",
    "troubelshooting": "troubleshooting",
    "cheta sheet": "cheat sheet",
    "progres bar": "progress bar",
    "PostgreSLQ": "postgresql",
}


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    """Return a function that searches the site for several queries."""
    folder = tmp_path_factory.mktemp("site")
    site.build(folder)

    def ask(*queries):
        command = ["node", Path(__file__).with_name("search_site.js"), folder]
        done = subprocess.run(
            command, input=json.dumps(queries), capture_output=True, text=True, timeout=60, check=True
        )
        return json.loads(done.stdout)

    return ask


def test_words_that_users_search_lead_to_their_page_within_three_hits(search):
    first = {words: answer["found"][:3] for words, answer in zip(SOUGHT, search(*SOUGHT), strict=True)}
    assert {words: found for words, found in first.items() if SOUGHT[words] not in found} == {}


def test_names_lead_to_the_reference_within_three_hits(search):
    for name, answer in zip(("drain", "FaktoryTask"), search("drain", "FaktoryTask"), strict=True):
        assert any(f"{hit}.".endswith(f".{name}.") for hit in answer["found"][:3]), name


def test_design_decisions_and_pictures_are_not_found(search):
    pages = {hit.partition("#")[0] for answer in search("decision", "delay", "overview") for hit in answer["found"]}
    assert pages
    assert [page for page in pages if page.startswith("adr") or page == "screens"] == []


def test_a_misspelt_search_suggests_what_was_meant(search):
    suggested = [answer["suggestion"] for answer in search(*MISSPELT)]
    assert dict(zip(MISSPELT, suggested, strict=True)) == MISSPELT


def test_known_words_and_words_unlike_any_are_not_replaced(search):
    queries = ("retry", "rate limit", "Batch", "qqqqqqq", "", "a b", "<script>alert(1)</script>")
    assert [answer["suggestion"] for answer in search(*queries)] == [None] * len(queries)
