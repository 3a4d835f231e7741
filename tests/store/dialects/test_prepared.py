"""PostgreSQL's prepared statements: when they are prepared, and the fallback if they cannot be kept."""

import pytest
from django.db import connection, transaction
from django.db.utils import ProgrammingError
from django.test.utils import CaptureQueriesContext

from django_faktory.brokers import get_broker
from django_faktory.core.payloads import Ack, FetchRequest, new_job
from django_faktory.errors import FaktoryError
from django_faktory.store.dialects import dialect_of
from django_faktory.store.dialects.postgresql import prepared
from django_faktory.store.dialects.postgresql.pipeline import has_psycopg3
from django_faktory.store.dialects.postgresql.prepared import Command
from tests.bouncer import needs_session

pytestmark = [pytest.mark.django_db(transaction=True), needs_session("prepared statements need a session")]


@pytest.fixture
def statement():
    if connection.vendor != "postgresql" or not has_psycopg3():
        pytest.skip("about PostgreSQL")
    yield Command("answer", ["int", "text"], "SELECT $1 + 1, $2 || $2")
    Command.works = True
    connection.close()  # ends its prepared statements


def answers(statement, times=1):
    """Return the rows of this many uses."""
    rows = []
    for _ in range(times):
        [found] = prepared.execute_on(connection, [(statement, [1, "a"])])
        rows += found
    return rows


def prepared_names():
    with connection.cursor() as cursor:
        cursor.execute("SELECT name FROM pg_prepared_statements")
        return [name for (name,) in cursor.fetchall()]


def test_a_statement_is_prepared_once_at_its_third_use_on_a_connection(statement):
    connection.close()
    connection.close_pool()
    assert answers(statement, 2) == [(2, "aa")] * 2
    assert prepared_names() == []
    assert answers(statement, 3) == [(2, "aa")] * 3
    [name] = prepared_names()
    assert name.startswith("answer_")


def test_several_statements_are_one_message_and_each_returns_its_rows(statement):
    with connection.cursor() as cursor:
        cursor.execute("CREATE TEMPORARY TABLE noted (what text)")
        note = Command("note", ["text"], "INSERT INTO noted VALUES ($1)", gives_rows=False)
        read = Command("read", ["int"], "SELECT what FROM noted LIMIT $1")
        for use in range(4):
            with CaptureQueriesContext(connection) as queries:
                found = prepared.execute_on(connection, [(statement, [use, "b"]), (note, ["x"]), (read, [9])])
            assert found == [[(use + 1, "bb")], [], [("x",)] * (use + 1)]
            assert len(queries) == 1
        with pytest.raises(Exception, match="division by zero"):
            prepared.execute_on(connection, [(note, ["x"]), (Command("wrong", ["int"], "SELECT 1 / $1"), [0])])
        assert prepared.execute_on(connection, [(read, [9])]) == [[("x",)] * 4], "all of them or none"
        cursor.execute("DROP TABLE noted")


def test_server_side_binding_sends_statements_one_by_one(statement):
    connection.close()
    options = connection.settings_dict["OPTIONS"]
    connection.settings_dict["OPTIONS"] = {**options, "server_side_binding": True}
    try:
        with transaction.atomic():
            for _ in range(4):
                found = prepared.execute_on(connection, [(statement, [1, "a"]), (statement, [2, "b"])])
                assert found == [[(2, "aa")], [(3, "bb")]]
        assert not dialect_of(connection).can_join(connection)
    finally:
        connection.settings_dict["OPTIONS"] = options
        connection.close()


def test_a_new_connection_has_no_prepared_statements(statement):
    answers(statement, 3)
    connection.close()
    connection.close_pool()  # Django's pool would return the same session
    assert answers(statement) == [(2, "aa")]
    assert prepared_names() == []


def test_statements_are_sent_unprepared_behind_a_pooler_that_loses_them(statement, caplog):
    answers(statement, 3)
    with connection.cursor() as cursor:
        cursor.execute("DEALLOCATE ALL")  # as if the next transaction had another session
    assert answers(statement, 3) == [(2, "aa")] * 3
    assert Command.works is False
    assert caplog.text.count("prepared statements are lost") == 1
    assert prepared_names() == []


def test_a_lost_prepared_statement_in_a_transaction_raises_to_the_caller(statement):
    answers(statement, 3)
    with connection.cursor() as cursor:
        cursor.execute("DEALLOCATE ALL")
        with pytest.raises(ProgrammingError), transaction.atomic():
            prepared.execute_on(connection, [(statement, [1, "a"])])
    assert answers(statement) == [(2, "aa")]


def test_other_errors_are_raised_unchanged(statement):
    wrong = Command("wrong", ["int"], "SELECT 1 / $1")
    for _ in range(4):
        with pytest.raises(Exception, match="division by zero"):
            prepared.execute_on(connection, [(wrong, [0])])
    assert Command.works is True


def test_an_unsupported_database_raises_an_error_naming_it(monkeypatch):
    monkeypatch.setattr(connection, "vendor", "oracle")
    with pytest.raises(FaktoryError, match="expected PostgreSQL, MariaDB or SQLite, got oracle"):
        dialect_of(connection)


def test_no_hot_statement_is_planned_at_each_use(statement):
    connection.close()  # a new session: it has no statements that earlier tests have prepared and used
    broker = get_broker()
    for number in range(12):
        jids = [f"{number:04d}-{one:05d}" for one in range(3)]
        broker.push([new_job(jid=jid, jobtype="x", args=[]) for jid in jids])
        [found] = broker.fetch([FetchRequest(queues=("default",), wid="w1", count=3)])
        broker.ack([Ack(jid=one.jid, wid="w1", attempt=one.attempt, result="null") for one in found])
    with connection.cursor() as cursor:
        cursor.execute("SELECT name, custom_plans, generic_plans FROM pg_prepared_statements WHERE name ~ '^faktory_'")
        plans = cursor.fetchall()
    # PostgreSQL plans the first five uses for the given values, and then compares the costs.
    assert [plan for plan in plans if plan[1] > 5] == []
    assert sum(plan[2] for plan in plans) > 0
