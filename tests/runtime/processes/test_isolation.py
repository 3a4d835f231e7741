"""runfaktory over a database with SERIALIZABLE transactions reports the setting to change, and does not start."""

import pytest
from django.db import connection

from tests.bouncer import needs_session
from tests.runtime.processes.test_runfaktory import ANY_PORT
from tests.settings import KIND

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(KIND != "postgresql", reason="a default of the database is PostgreSQL's"),
    needs_session("open sessions keep their default"),
]


def test_a_database_with_serializable_as_default_is_refused_with_exit_code_1(runfaktory):
    name = connection.ops.quote_name(connection.settings_dict["NAME"])
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    try:
        program = runfaktory(ANY_PORT, "--processes", "1")
        assert program.code() == 1
    finally:
        connection.close()
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER DATABASE {name} RESET default_transaction_isolation")
        connection.close()
    program.wait_for_log("django_faktory.E016", "expected read committed, got serializable")
    program.wait_for_log("HINT", "default_transaction_isolation")
