"""Test the system checks on access: the settings that trigger each, and that no message shows a secret."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from django.core.checks import run_checks
from django.db import connections
from django.test import override_settings

from django_faktory.checks.security import is_loopback
from django_faktory.server.listening import find_max_backlog
from tests.programs import ROOT
from tests.server.raw import CERTIFICATE

pytestmark = [pytest.mark.once, pytest.mark.django_db(databases=["default", "other"])]

GOOD = {"PASSWORD": "a-password-that-is-long-enough"}


def find_warnings(*, deploy=True, environment=None, **settings):
    with override_settings(FAKTORY=settings):
        found = run_checks(include_deployment_checks=deploy)
    return {
        message.id.rpartition(".")[2]: f"{message.msg} | {message.hint}" for message in found if "W06" in message.id
    }


def test_a_secure_project_gets_no_warnings():
    assert find_warnings(**GOOD) == {}


@pytest.mark.parametrize("bind", ["0.0.0.0:7419", "[::]:7419", "10.0.0.7:7419", "jobs.example.com:7419"])
def test_a_public_bind_without_a_password_is_a_warning_even_without_deploy(bind):
    found = find_warnings(deploy=False, BIND=bind)
    assert list(found) == ["W060"]
    assert "no password" in found["W060"]
    assert "FAKTORY_PASSWORD" in found["W060"]


@pytest.mark.parametrize("bind", ["127.0.0.1:7419", "localhost:7419", "[::1]:7419", "127.8.8.8:1"])
def test_a_loopback_bind_without_a_password_is_a_warning_only_with_deploy(bind):
    assert find_warnings(deploy=False, BIND=bind) == {}
    assert list(find_warnings(BIND=bind)) == ["W061"]


def test_a_short_password_is_a_warning_that_does_not_show_it():
    found = find_warnings(PASSWORD="swordfish")
    assert list(found) == ["W062"]
    assert "swordfish" not in found["W062"]


def test_a_public_bind_without_tls_is_a_warning():
    assert list(find_warnings(**GOOD, BIND="0.0.0.0:7419")) == ["W063"]
    assert "W063" not in find_warnings(**GOOD, BIND="0.0.0.0:7419", TLS_CERT=str(CERTIFICATE))


def test_more_connections_than_the_system_lets_wait_are_a_warning():
    if find_max_backlog() is None:
        pytest.skip("only Linux shows its limit")
    found = find_warnings(**GOOD, MAX_CONNECTIONS=find_max_backlog() + 1)
    assert list(found) == ["W067"]
    assert f"somaxconn={find_max_backlog() + 1}" in found["W067"]


def test_a_remote_broker_without_tls_is_a_warning(monkeypatch):
    monkeypatch.setenv("FAKTORY_URL", "tcp://:s3cr3t-word@jobs.example.com:7419")
    found = find_warnings(**GOOD, BROKER="remote")
    assert list(found) == ["W064"]
    assert "s3cr3t-word" not in found["W064"]
    monkeypatch.setenv("FAKTORY_URL", "tcp+tls://:s3cr3t-word@jobs.example.com:7419")
    assert find_warnings(**GOOD, BROKER="remote") == {}


def test_a_world_readable_password_file_is_a_warning(tmp_path):
    file = tmp_path / "password"
    file.write_text(GOOD["PASSWORD"])
    file.chmod(0o644)
    found = find_warnings(PASSWORD=str(file))
    assert list(found) == ["W065"]
    assert str(file) in found["W065"]
    file.chmod(0o640)
    assert find_warnings(PASSWORD=str(file)) == {}


@pytest.fixture
def open_folder():
    """Yield a folder that every user of this machine may enter: pytest's temporary folders deny access to others."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder).resolve()


def test_a_world_readable_sqlite_database_is_a_warning(open_folder, monkeypatch):
    """The database contains the arguments of jobs."""
    file = open_folder / "db.sqlite3"
    file.touch(0o644)
    settings = connections["default"].settings_dict
    monkeypatch.setitem(settings, "ENGINE", "django.db.backends.sqlite3")
    monkeypatch.setitem(settings, "NAME", file)
    found = find_warnings(**GOOD)
    assert list(found) == ["W065"]
    assert f"every user of this machine can read {file}" in found["W065"]
    file.chmod(0o640)
    assert find_warnings(**GOOD) == {}
    file.chmod(0o644)
    open_folder.chmod(0o750)
    assert find_warnings(**GOOD) == {}


@pytest.mark.parametrize("name", [":memory:", "file:jobs?mode=memory&cache=shared", "", "no-such-file"])
def test_a_database_without_a_file_gives_no_warning(monkeypatch, name):
    settings = connections["default"].settings_dict
    monkeypatch.setitem(settings, "ENGINE", "django.db.backends.sqlite3")
    monkeypatch.setitem(settings, "NAME", name)
    assert find_warnings(**GOOD) == {}


def test_allowing_the_flush_command_is_a_warning():
    assert list(find_warnings(**GOOD, ALLOW_FLUSH=True)) == ["W066"]


@pytest.mark.parametrize(
    ("host", "is_near"), [("", False), ("::1", True), ("::ffff:10.0.0.1", False), ("LOCALHOST", True)]
)
def test_loopback_hosts_are_recognized(host, is_near):
    assert is_loopback(host) is is_near


def test_an_invalid_bind_address_gives_no_password_warning():
    """E002 already reports the invalid address."""
    assert "W060" not in find_warnings(deploy=False, BIND="localhost")


ENCRYPTS = """
from django_faktory import task

@task(encrypt=True)
def hides(value): ...
"""


def test_the_encryption_check_finds_a_task_without_a_key_by_itself(tmp_path):
    app = tmp_path / "hiding"
    app.mkdir()
    (app / "__init__.py").touch()
    (app / "tasks.py").write_text(ENCRYPTS)
    environment = {
        **os.environ, "DJANGO_SETTINGS_MODULE": "tests.runtime.processes.settings", "PYTHONPATH": str(ROOT),
        "FAKTORY_TEST_APPS": "hiding", "FAKTORY_TEST_PATH": str(tmp_path), "FAKTORY_TEST_SETTINGS": "{}",
    }  # fmt: skip
    # Django keeps checks in a set: any may be the first, and none may rely on another to import the tasks.
    code = (
        "import django; django.setup()\n"
        "from django_faktory.checks.security import check_encryption\n"
        "print([message.id for message in check_encryption()])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "['django_faktory.E060']", done.stderr
