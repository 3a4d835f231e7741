"""Test that the scan of `scripts/lint` reports a committed key, and ignores what the baseline accepts."""

import secrets
import subprocess

import pytest

from tests.test_house_rules import script

pytestmark = pytest.mark.core


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Return the scan module for an empty repository with an empty baseline; `add` adds a file to git."""
    scan = script("scan")
    monkeypatch.setattr(scan, "ROOT", tmp_path)
    monkeypatch.setattr(scan, "BASELINE", tmp_path / ".secrets.baseline")
    scan.BASELINE.write_text("[]")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)

    def add(name, text):
        (tmp_path / name).write_text(text)
        subprocess.run(["git", "-C", tmp_path, "add", name], check=True)

    scan.add = add
    return scan


def test_a_committed_key_is_reported_until_it_is_in_the_baseline(repository, capsys):
    repository.add("keys.py", f'TOKEN = "{secrets.token_hex(32)}"\n')
    assert repository.secrets(accept=False) == 1
    assert "keys.py:1: " in capsys.readouterr().out
    assert repository.secrets(accept=True) == 0
    assert repository.secrets(accept=False) == 0


def test_plain_code_is_not_reported_as_a_secret(repository):
    repository.add("plain.py", 'PASSWORD = ""\nNAME = "a plain sentence of words"\n')
    assert repository.secrets(accept=False) == 0
