"""`manage.py check --database default` refuses an encoding that cannot store every text, and says what to do."""

import pytest
from django.core.checks import run_checks
from django.db import connection

from tests.refused.conftest import created, execute, replaced_default


def encoding_errors():
    return [message for message in run_checks(databases=["default"]) if message.id == "django_faktory.E018"]


def test_an_encoding_that_cannot_store_every_text_is_an_error(kind, narrow):
    if kind == "packet":
        assert encoding_errors() == []
        return
    [error] = encoding_errors()
    assert f" {kind}" in error.msg
    assert ("TEMPLATE template0" if connection.vendor == "postgresql" else "ALTER TABLE") in error.hint


def test_a_session_that_cannot_send_every_text_is_an_error(narrow):
    if connection.vendor != "mysql":
        pytest.skip("Django's session of PostgreSQL is always in UTF8")
    execute("SET NAMES utf8mb3")
    [error] = encoding_errors()
    connection.close()
    assert "charset utf8mb3 of the session" in error.msg
    assert '"charset": "utf8mb4"' in error.hint


def test_the_statements_of_the_hint_make_every_text_storable(kind, narrow):
    if kind not in ("utf8mb3", "latin1"):
        pytest.skip("only MariaDB can change its encoding")
    with created(kind, "_2") as address, replaced_default(address):
        [error] = encoding_errors()
        execute(*error.hint.split("; "))
        assert encoding_errors() == []
