"""One table decides what an error of a database means: errors that the databases themselves raise."""

import sqlite3
from contextlib import nullcontext

import pytest
from django.db import DatabaseError, OperationalError, connection, transaction

from django_faktory.errors import BrokerUnavailable, InvalidPayload
from django_faktory.store.database_errors import ErrorKind, first_line, is_collision, kind_of
from django_faktory.store.transactions import run

pytestmark = pytest.mark.django_db(transaction=True)

STATEMENTS = {
    ErrorKind.DATA: {
        "postgresql": "SELECT cast('x' AS integer)",
        "mysql": "INSERT INTO django_faktory_queue (name, used_at) VALUES (REPEAT('x', 300), NOW())",
        "sqlite": "SELECT zeroblob(2000000000)",
    },
    ErrorKind.CONFIGURATION: dict.fromkeys(("postgresql", "mysql", "sqlite"), "SELECT 1 FROM django_faktory_nosuch"),
    ErrorKind.DEFECT: {
        "postgresql": "SELECT nosuch()",
        "mysql": "SELECT FROM",
    },
}


def execute(sql):
    def verb(at):
        with at.cursor() as cursor:
            cursor.execute(sql)

    return verb


@pytest.mark.parametrize(
    ("kind", "sql"), [(kind, by_vendor.get(connection.vendor)) for kind, by_vendor in STATEMENTS.items()]
)
def test_the_code_of_an_error_decides_what_it_means(kind, sql):
    if sql is None:
        pytest.skip("SQLite has one code for all of them")
    with pytest.raises(DatabaseError) as raised, transaction.atomic():
        execute(sql)(connection)
    assert kind_of(raised.value) is kind


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_value_that_the_database_refuses_is_no_outage_and_is_named_without_the_drivers_message(is_inside):
    verb = execute(STATEMENTS[ErrorKind.DATA][connection.vendor])
    with pytest.raises(InvalidPayload) as raised, transaction.atomic() if is_inside else nullcontext():
        run("default", verb)
    assert str(raised.value).startswith("invalid payload: the database cannot store a value that")
    assert first_line(raised.value.__cause__) not in str(raised.value)


def test_a_missing_table_is_an_outage_that_says_what_to_run():
    with pytest.raises(BrokerUnavailable, match=r"database unavailable: .*; run manage\.py migrate$"):
        run("default", execute("SELECT 1 FROM django_faktory_nosuch"))


def test_text_that_the_driver_cannot_encode_is_an_error_of_the_data():
    with pytest.raises(InvalidPayload, match="a character that its encoding does not have"):
        run("default", lambda at: at.cursor().execute("SELECT %s", ["\ud800"]))


def test_errors_without_a_code_count_by_their_class():
    assert kind_of(OperationalError("server closed the connection")) is ErrorKind.OUTAGE
    assert kind_of(OperationalError()) is ErrorKind.OUTAGE
    assert kind_of(ZeroDivisionError()) is ErrorKind.DEFECT
    assert first_line(OperationalError()) == "OperationalError"


def test_a_busy_sqlite_is_a_collision(tmp_path):
    first, second = (sqlite3.connect(tmp_path / "busy.sqlite3", timeout=0) for _ in range(2))
    first.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError) as raised:
        second.execute("BEGIN IMMEDIATE")
    error = OperationalError(*raised.value.args)
    error.__cause__ = raised.value
    assert is_collision(error)
    first.close(), second.close()
