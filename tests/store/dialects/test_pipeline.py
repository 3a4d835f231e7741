"""Hot statements sent directly through libpq: values, rows, errors and transactions are as with the driver."""

from datetime import UTC, datetime

import psycopg
import psycopg.types.string
import pytest
from django.db import DataError, IntegrityError, InterfaceError, OperationalError, connection, transaction
from django.db.backends.utils import CursorWrapper
from django.test.utils import CaptureQueriesContext

from django_faktory.store.dialects.postgresql import pipeline, prepared
from django_faktory.store.dialects.postgresql.prepared import Command
from tests.bouncer import needs_session

pytestmark = [pytest.mark.django_db(transaction=True), needs_session("prepared statements need a session")]

ODD = ["", "a", "NULL", 'quo"te', "back\\slash", "{}", ",", "ü€😀", "\x01\x7f", " "]


@pytest.fixture(autouse=True)
def on_postgresql():
    if connection.vendor != "postgresql" or not pipeline.has_psycopg3():
        pytest.skip("about PostgreSQL")
    yield
    Command.works = True
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS noted")
    connection.close()  # ends its prepared statements


def make_ready(*statements):
    """Prepare the statements, as their third use would."""
    connection.ensure_connection()
    for statement in statements:
        for _ in range(prepared.USES_BEFORE + 1):
            statement.text(connection)
        assert statement.prepared_name(connection)


@pytest.fixture
def sent(monkeypatch):
    """Record the names of the statements that went through libpq."""
    names = []
    real = pipeline.run_prepared

    def spy(on, calls):
        names.append([name.split("_")[0] for name, _ in calls])
        return real(on, calls)

    monkeypatch.setattr(prepared, "run_prepared", spy)
    return names


def rows_of(statement, *values):
    [rows] = prepared.execute_on(connection, [(statement, values)])
    return rows


def assert_next_connection_echoes(echo):
    connection.close()
    make_ready(echo)
    assert rows_of(echo, "again") == [("again",)]


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        ("text", [*ODD, None, "x" * 3_000_000]),
        ("varchar", ["a", None]),
        ("json", ['{"a": [1, "\\u00fc"]}', None]),
        ("int", [0, -1, 2**31 - 1, -(2**31), None]),
        ("smallint", [0, -32768, 32767]),
        ("bigint", [2**63 - 1, -(2**63)]),
        ("boolean", [True, False, None]),
        (
            "timestamptz",
            [
                datetime(2026, 11, 21, 12, 0, 0, 1, tzinfo=UTC),
                datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
                datetime(9999, 12, 31, tzinfo=UTC),
                None,
            ],
        ),
    ],
)
def test_parameter_values_round_trip_unchanged(type_, values, sent):
    echo = Command("echo", [type_], "SELECT $1 AS value")
    make_ready(echo)
    for value in values:
        assert rows_of(echo, value) == [(value,)]
    assert sent == [["echo"]] * len(values)


def test_lists_are_sent_as_arrays(sent):
    texts = Command("texts", ["text[]", "int[]"], "SELECT * FROM unnest($1, $2)")
    make_ready(texts)
    assert rows_of(texts, ODD, list(range(10))) == list(zip(ODD, range(10), strict=True))
    assert rows_of(texts, [], []) == []
    assert rows_of(texts, ["x" * 3_000_000], [1]) == [("x" * 3_000_000, 1)]
    assert len(sent) == 3


def test_a_list_with_a_nul_is_rejected_and_the_connection_stays_usable(sent):
    texts = Command("texts", ["text[]"], "SELECT * FROM unnest($1)")
    make_ready(texts)
    with pytest.raises(DataError):
        rows_of(texts, ["a", "a\x00b"])
    assert rows_of(texts, ["again"]) == [("again",)]
    assert len(sent) == 2


def test_text_with_a_nul_is_rejected_and_the_connection_stays_usable(sent):
    echo = Command("echo", ["text"], "SELECT $1 AS value")
    make_ready(echo)
    with pytest.raises(DataError, match="NUL"):
        rows_of(echo, "a\x00b")
    assert rows_of(echo, "good") == [("good",)]


def test_several_statements_form_one_transaction(sent):
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE noted (what int UNIQUE)")
    note = Command("note", ["int"], "INSERT INTO noted VALUES ($1)", gives_rows=False)
    count = Command("count", ["int"], "SELECT COUNT(*) FROM noted WHERE what < $1")
    make_ready(note, count)
    assert prepared.execute_on(connection, [(note, [1]), (note, [2]), (count, [9])]) == [[], [], [(2,)]]
    with pytest.raises(IntegrityError, match="noted_what_key") as caught:
        prepared.execute_on(connection, [(note, [3]), (note, [1]), (count, [9])])
    assert caught.value.__cause__.sqlstate == "23505"
    assert rows_of(count, 9) == [(2,)]
    assert sent[0] == ["note", "note", "count"]


def test_statements_inside_atomic_join_its_transaction(sent):
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE noted (what int UNIQUE)")
    note = Command("note", ["int"], "INSERT INTO noted VALUES ($1)", gives_rows=False)
    count = Command("count", ["int"], "SELECT COUNT(*) FROM noted WHERE what < $1")
    make_ready(note, count)
    with transaction.atomic():
        rows_of(note, 1)  # the first statement of the block must begin the transaction
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO noted VALUES (2)")
        assert rows_of(count, 9) == [(2,)]
        transaction.set_rollback(True)
    assert rows_of(count, 9) == [(0,)]
    with transaction.atomic():
        rows_of(note, 1)
    assert rows_of(count, 9) == [(1,)]
    assert len(sent) == 5


@pytest.mark.parametrize(
    ("option", "value", "shown"),
    [
        ("isolation_level", 3, {"transaction_isolation": "repeatable read"}),
        ("isolation_level", 4, {"transaction_isolation": "serializable"}),
        ("read_only", True, {"transaction_read_only": "on"}),
        ("deferrable", True, {"transaction_deferrable": "on"}),
    ],
)
def test_a_transaction_begun_by_a_statement_has_the_requested_options(option, value, shown):
    """Django's option `isolation_level` sets the same attribute of the driver."""
    echo = Command("echo", ["text"], "SELECT $1")
    make_ready(echo)
    setattr(connection.connection, option, value)
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            assert rows_of(echo, "first") == [("first",)]
            for name, expected in shown.items():
                cursor.execute(f"SHOW {name}")
                assert cursor.fetchone() == (expected,)
    finally:
        setattr(connection.connection, option, None)  # otherwise a pool would hand on the connection with this option


def test_a_savepoint_preserves_the_transaction_after_an_error(sent):
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE noted (what int UNIQUE)")
    note = Command("note", ["int"], "INSERT INTO noted VALUES ($1)", gives_rows=False)
    make_ready(note)
    with transaction.atomic():
        rows_of(note, 1)
        with pytest.raises(IntegrityError), transaction.atomic():
            rows_of(note, 1)
        rows_of(note, 2)
    with connection.cursor() as cursor:
        cursor.execute("SELECT what FROM noted ORDER BY what")
        assert cursor.fetchall() == [(1,), (2,)]
    assert len(sent) == 3


def test_a_broken_connection_raises_an_error_and_the_next_one_works(sent):
    end_self = Command("end", ["boolean"], "SELECT pg_terminate_backend(pg_backend_pid()) WHERE $1")
    echo = Command("echo", ["text"], "SELECT $1 AS value")
    make_ready(end_self)
    with pytest.raises((OperationalError, InterfaceError)):
        rows_of(end_self, True)
    assert sent == [["end"]]
    assert not connection.is_usable()
    assert_next_connection_echoes(echo)


def test_an_interrupted_query_leaves_no_reply_for_the_next_query(monkeypatch):
    echo = Command("echo", ["text"], "SELECT $1 AS value")
    make_ready(echo)

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "_receive_results", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rows_of(echo, "mine")
    monkeypatch.undo()
    with pytest.raises((OperationalError, InterfaceError)):
        rows_of(echo, "theirs")
    assert_next_connection_echoes(echo)


class TestWithoutACursor:
    """Tests of `execute_on`, which makes a cursor only if one is needed."""

    @pytest.fixture
    def echo(self):
        found = Command("echo", ["text"], "SELECT $1 AS value")
        make_ready(found)
        return found

    @pytest.fixture
    def cursors(self, monkeypatch):
        """Return a list with an entry for each cursor made."""
        made = []
        real = CursorWrapper.__init__
        monkeypatch.setattr(CursorWrapper, "__init__", lambda self, *args: made.append(1) or real(self, *args))
        return made

    def test_a_prepared_statement_needs_no_cursor(self, echo, cursors, sent):
        assert prepared.execute_on(connection, [(echo, ["a"])]) == [[("a",)]]
        assert (cursors, sent) == ([], [["echo"]])

    def test_an_unprepared_statement_needs_no_cursor(self, cursors, sent):
        echo = Command("echo", ["text"], "SELECT $1 AS value")
        for _ in range(prepared.USES_BEFORE):
            assert prepared.execute_on(connection, [(echo, ["a"])]) == [[("a",)]]
        assert not echo.prepared_name(connection)
        assert (cursors, len(sent)) == ([], prepared.USES_BEFORE)

    def test_a_closed_driver_connection_raises_a_django_error(self, echo):
        connection.connection.close()
        with pytest.raises((OperationalError, InterfaceError)):
            prepared.execute_on(connection, [(echo, ["a"])])
        connection.close()
        assert prepared.execute_on(connection, [(echo, ["a"])]) == [[("a",)]]

    def test_a_health_check_replaces_a_dead_connection_before_use(self, echo):
        if connection.pool:
            pytest.skip("a pool checks its connections")
        other = connection.copy()
        with other.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [connection.connection.info.backend_pid])
        other.close()
        connection.health_check_enabled, connection.health_check_done = True, False  # as CONN_HEALTH_CHECKS does
        assert prepared.execute_on(connection, [(echo, ["a"])]) == [[("a",)]]

    def test_execution_continues_unprepared_after_deallocate_all(self, echo, sent):
        with connection.cursor() as cursor:
            cursor.execute("DEALLOCATE ALL")
        assert prepared.execute_on(connection, [(echo, ["a"])]) == [[("a",)]]
        assert not Command.works
        assert prepared.execute_on(connection, [(echo, ["b"])]) == [[("b",)]]
        assert [names for names in sent if names == ["echo"]] == [["echo"]]


def test_execute_wrappers_see_every_statement(sent):
    echo = Command("echo", ["text"], "SELECT $1 AS value")
    make_ready(echo)
    seen = []

    def listen(execute, sql, params, many, context):
        seen.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(listen):
        rows_of(echo, "a")
    with CaptureQueriesContext(connection) as queries:
        rows_of(echo, "a")
    assert len(seen) == len(queries) == 1
    assert sent == []


def test_another_client_encoding_uses_the_driver(sent):
    echo = Command("echo", ["text"], "SELECT $1 AS value")
    make_ready(echo)
    with connection.cursor() as cursor:
        cursor.execute("SET client_encoding TO latin1")
        try:
            assert rows_of(echo, "ü") == [("ü",)]
        finally:
            cursor.execute("SET client_encoding TO utf8")
    assert sent == []


@pytest.mark.parametrize("some", [[None, 'quo"te, }'], ['quo"te, }', None], [None, None], ["", None, "a"]], ids=repr)
def test_a_list_of_texts_may_contain_null(sent, some):
    """The list holds results of jobs, and NULL for jobs without one."""
    texts = Command("texts", ["text[]"], "SELECT * FROM unnest($1)")
    make_ready(texts)
    assert rows_of(texts, some) == [(text,) for text in some]
    assert len(sent) == 1


def test_custom_loaders_of_the_project_do_not_affect_results(sent):
    class Shouting(psycopg.adapt.Loader):
        format = psycopg.pq.Format.BINARY

        def load(self, data):
            return bytes(data).decode().upper()

    psycopg.adapters.register_loader("text", Shouting)
    pipeline._reader.cache_clear()
    try:
        echo = Command("echo", ["text"], "SELECT $1")
        make_ready(echo)
        assert rows_of(echo, "quiet") == [("quiet",)]
    finally:
        psycopg.adapters.register_loader("text", psycopg.types.string.TextBinaryLoader)
    assert sent == [["echo"]]


def test_times_are_returned_in_utc_in_any_session_time_zone(sent):
    echo_time = Command("echo", ["timestamptz"], "SELECT $1")
    make_ready(echo_time)
    with connection.cursor() as cursor:
        cursor.execute("SET TIME ZONE 'Asia/Tokyo'")
    try:
        [[returned]] = rows_of(echo_time, datetime(2026, 11, 23, 8, tzinfo=UTC))
    finally:
        connection.close()
    assert returned.isoformat() == "2026-11-23T08:00:00+00:00"
    assert sent == [["echo"]]
