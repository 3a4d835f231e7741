"""Run the examples of docs/testing.md unchanged: they are the body of this module."""

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "testing.md"
TEXT = DOCUMENT.read_text()


def _examples():
    """Return the Python blocks, with empty lines for the text between them: line numbers equal the page's."""
    lines, inside = [], False
    for line in TEXT.splitlines():
        if inside and line == "```":
            inside = False
        lines.append(line if inside else "")
        if line == "```python":
            inside = True
    return "\n".join(lines)


exec(compile(_examples(), str(DOCUMENT), "exec"))

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]


def test_every_test_in_the_document_is_collected():
    names = re.findall(r"^(?:class|def) (\w*Test|test_\w+)\b", TEXT, re.MULTILINE)
    assert len(names) == 8
    assert all(name in globals() for name in names)
