"""PostgreSQL's prepared statements: when they are planned, when again, and the fallback if they cannot be kept."""

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
from django_faktory.store.dialects.postgresql.prepared import Statement
from tests.bouncer import needs_session
from tests.clocks import Clock

pytestmark = [pytest.mark.django_db(transaction=True), needs_session("prepared statements need a session")]


@pytest.fixture
def statement():
    if connection.vendor != "postgresql" or not has_psycopg3():
        pytest.skip("about PostgreSQL")
    yield Statement("answer", ["int", "text"], "SELECT $1 + 1, $2 || $2")
    Statement.works = True
    connection.close()  # ends its prepared statements


def answers(statement, times=1):
    """Return the rows of this many uses, and the SQL that was sent to the database."""
    with CaptureQueriesContext(connection) as queries, connection.cursor() as cursor:
        rows = []
        for _ in range(times):
            [found] = prepared.execute(cursor, [(statement, [1, "a"])])
            rows += found
    return rows, [query["sql"].split()[0] for query in queries]


def test_a_statement_is_prepared_at_its_third_use_on_a_connection(statement):
    rows, sent = answers(statement, 5)
    assert rows == [(2, "aa")] * 5
    assert sent == ["SELECT", "SELECT", "PREPARE", "EXECUTE", "EXECUTE", "EXECUTE"]


def test_several_statements_are_one_message_and_each_returns_its_rows(statement):
    with connection.cursor() as cursor:
        cursor.execute("CREATE TEMPORARY TABLE noted (what text)")
        note = Statement("note", ["text"], "INSERT INTO noted VALUES ($1)", gives_rows=False)
        read = Statement("read", ["int"], "SELECT what FROM noted LIMIT $1")
        for use in range(4):
            with CaptureQueriesContext(connection) as queries, connection.cursor() as own:
                found = prepared.execute(own, [(statement, [use, "b"]), (note, ["x"]), (read, [9])])
            assert found == [[(use + 1, "bb")], [], [("x",)] * (use + 1)]
            assert len(queries) == (4 if use == 2 else 1), "the third use prepares all three statements"
        with pytest.raises(Exception, match="division by zero"):
            prepared.execute(cursor, [(note, ["x"]), (Statement("wrong", ["int"], "SELECT 1 / $1"), [0])])
        assert prepared.execute(cursor, [(read, [9])]) == [[("x",)] * 4], "all of them or none"
        cursor.execute("DROP TABLE noted")


def test_server_side_binding_sends_statements_one_by_one(statement):
    connection.close()
    options = connection.settings_dict["OPTIONS"]
    connection.settings_dict["OPTIONS"] = {**options, "server_side_binding": True}
    try:
        with connection.cursor() as cursor, transaction.atomic():
            for _ in range(4):
                found = prepared.execute(cursor, [(statement, [1, "a"]), (statement, [2, "b"])])
                assert found == [[(2, "aa")], [(3, "bb")]]
        assert not dialect_of(connection).can_join(connection)
    finally:
        connection.settings_dict["OPTIONS"] = options
        connection.close()


def test_a_new_connection_has_no_prepared_statements(statement):
    answers(statement, 3)
    connection.close()
    connection.close_pool()  # Django's pool would return the same session
    assert answers(statement)[1] == ["SELECT"]


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(prepared, "time", made)
    return made


def test_a_plan_is_renewed_after_its_maximum_age(statement, clock):
    answers(statement, 4)
    clock.now += prepared.REPLAN_S * 0.6
    assert answers(statement)[1] == ["EXECUTE"]
    clock.now += prepared.REPLAN_S * 0.6
    assert answers(statement)[1] == ["DEALLOCATE", "EXECUTE"]


def test_a_rarely_used_statement_is_sent_unprepared(statement, clock):
    answers(statement, 4)
    for _ in range(3):
        clock.now += prepared.REPLAN_S * 2
        assert answers(statement)[1] == ["SELECT"]
    assert answers(statement)[1] == ["DEALLOCATE", "EXECUTE"], "in use again"


def test_a_plan_that_does_not_depend_on_the_tables_is_kept(statement, clock):
    statement.ages = False
    answers(statement, 4)
    clock.now += prepared.REPLAN_S * 100
    assert answers(statement)[1] == ["EXECUTE"]


def test_statements_are_sent_unprepared_behind_a_pooler_that_loses_them(statement, caplog):
    answers(statement, 3)
    with connection.cursor() as cursor:
        cursor.execute("DEALLOCATE ALL")  # as if the next transaction had another session
    rows, _ = answers(statement, 3)
    assert rows == [(2, "aa")] * 3
    assert Statement.works is False
    assert caplog.text.count("prepared statements are lost") == 1
    assert answers(statement)[1] == ["SELECT"]


def test_a_lost_prepared_statement_in_a_transaction_raises_to_the_caller(statement):
    answers(statement, 3)
    with connection.cursor() as cursor:
        cursor.execute("DEALLOCATE ALL")
        with pytest.raises(ProgrammingError), transaction.atomic():
            prepared.execute(cursor, [(statement, [1, "a"])])
    assert answers(statement)[0] == [(2, "aa")]


def test_other_errors_are_raised_unchanged(statement):
    wrong = Statement("wrong", ["int"], "SELECT 1 / $1")
    with connection.cursor() as cursor:
        for _ in range(4):
            with pytest.raises(Exception, match="division by zero"):
                prepared.execute(cursor, [(wrong, [0])])
    assert Statement.works is True


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
