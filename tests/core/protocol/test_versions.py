"""The version that INFO sends: clients in Rust and Go read it as a semantic version."""

import re

import pytest

from django_faktory import __version__
from django_faktory.core.protocol.versions import semantic

pytestmark = pytest.mark.core

# The expression that semver.org suggests.
SEMANTIC = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(?:-((?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(?:\.(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?"
    r"(?:\+([0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*))?"
)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1.0.0", "1.0.0"),
        ("1.0.0rc1", "1.0.0-rc.1"),
        ("1.2a3", "1.2.0-alpha.3"),
        ("2.0.1b12", "2.0.1-beta.12"),
        ("1.0.0.dev4", "1.0.0-dev.4"),
        ("1.0.0rc1.dev4", "1.0.0-rc.1.dev.4"),
        ("1.0.0.post1", "1.0.0+post.1"),
        ("1!2.3.4.5+ubuntu.1", "2.3.4+ubuntu.1"),
        ("1.0.0.post2.dev3+local", "1.0.0-dev.3+post.2.local"),
    ],
)
def test_a_python_version_is_converted_to_a_semantic_version(version, expected):
    assert semantic(version) == expected
    assert SEMANTIC.fullmatch(expected)


def test_the_package_version_converts_to_a_semantic_version():
    assert SEMANTIC.fullmatch(semantic(__version__))


def test_an_invalid_version_is_left_unchanged():
    assert semantic("unknown") == "unknown"
