"""Docstrings and comments of the package, its tests and its tools are plain technical English (CONTRIBUTING.md)."""

import ast
import io
import re
import tokenize

import pytest

from tests.test_house_rules import OURS, PACKAGE, TESTS, name, tree

pytestmark = [pytest.mark.linted, pytest.mark.core]

OLD_WORDS = re.compile(
    r"\b(?:anew|as ever|be it|for ever|lest|nobody|no more|so long|so many|so much|somebody|tells?|those who|told|"
    r"who|whoever|whom|whose)\b",
    re.IGNORECASE,
)
"""Words for people (the text is about jobs and threads), and archaic words."""

MAX_OLD_WORDS = 0.001
"""Share of all words: a text about people may need one."""

CODE = re.compile(r"`[^`]*`|# (?:noqa|type:|fmt:|pragma:).*")


def docstrings(path):
    """Return every string that is a statement of its own, with its first line number."""
    return [
        (node.lineno, node.value.value)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def comments(path):
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def prose_of(path):
    return CODE.sub(" ", " ".join([*(text for _, text in docstrings(path)), *comments(path)]))


@pytest.mark.parametrize("files", [PACKAGE, [*OURS, *TESTS]], ids=["package", "everything"])
def test_docstrings_and_comments_contain_few_archaic_words(files):
    prose = {name(path): prose_of(path) for path in files}
    found = {path: words for path, text in prose.items() if (words := OLD_WORDS.findall(text))}
    count = sum(len(text.split()) for text in prose.values())
    assert sum(map(len, found.values())) <= MAX_OLD_WORDS * count, found
