"""Test that the scan of `scripts/lint` reports a committed key, and ignores what the baseline accepts."""

import secrets
import subprocess

import pytest

from scripts import scan

pytestmark = pytest.mark.core


@pytest.fixture
def repository(tmp_path):
    """Create an empty repository with an empty baseline, and return its folder."""
    (tmp_path / scan.BASELINE).write_text("[]")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def add(repository, name, text):
    (repository / name).write_text(text)
    subprocess.run(["git", "-C", repository, "add", name], check=True)


def test_a_committed_key_is_reported_until_it_is_in_the_baseline(repository, capsys):
    add(repository, "keys.py", f'TOKEN = "{secrets.token_hex(32)}"\n')
    assert scan.secrets(accept=False, root=repository) == 1
    assert "keys.py:1: " in capsys.readouterr().out
    assert scan.secrets(accept=True, root=repository) == 0
    assert scan.secrets(accept=False, root=repository) == 0


def test_plain_code_is_not_reported_as_a_secret(repository):
    add(repository, "plain.py", 'PASSWORD = ""\nNAME = "a plain sentence of words"\n')
    assert scan.secrets(accept=False, root=repository) == 0
