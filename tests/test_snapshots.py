"""A database copied from a snapshot equals one created by migrations."""

import json
import os
import subprocess
import sys

import pytest

from tests import services
from tests.bouncer import needs_session
from tests.programs import ROOT
from tests.settings import KIND, TAG

pytestmark = pytest.mark.slow

DESCRIBE = """
import json, sys
from datetime import datetime
import django
django.setup()
from django.db import connection
from tests import snapshots
if sys.argv[1] == "copy":
    snapshots.install(connection)
    connection.creation.create_test_db(verbosity=0, autoclobber=True, serialize=False)  # makes the copy
    connection.close()
connection.creation.create_test_db(verbosity=0, autoclobber=True, serialize=False)
found = {}
def created(cursor, table):
    if connection.vendor == "mysql":
        cursor.execute(f"SHOW CREATE TABLE {connection.ops.quote_name(table)}")
        return cursor.fetchone()[1]
DEFINED = {
    "sqlite": "SELECT name, sql FROM sqlite_master ORDER BY name",
    "postgresql": "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' UNION ALL"
    " SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint ORDER BY 1, 2",
}
with connection.cursor() as cursor:
    if statement := DEFINED.get(connection.vendor):
        cursor.execute(statement)
        found["definitions"] = cursor.fetchall()
    for table in sorted(connection.introspection.table_names(cursor)):
        cursor.execute(f"SELECT * FROM {connection.ops.quote_name(table)} ORDER BY 1")
        found[table] = {
            "rows": [[value for value in row if not isinstance(value, datetime)] for row in cursor.fetchall()],
            "created": created(cursor, table),
            "columns": connection.introspection.get_table_description(cursor, table),
            "constraints": connection.introspection.get_constraints(cursor, table),
            "sequences": connection.introspection.get_sequences(cursor, table),
        }
print(json.dumps(found, sort_keys=True, default=str))
connection.creation.destroy_test_db(connection.settings_dict["NAME"], verbosity=0)
"""


def described(how):
    own = {"DJANGO_SETTINGS_MODULE": "tests.settings", "FAKTORY_TEST_TAG": f"{TAG}_{how}"}
    command = [sys.executable, "-W", "ignore", "-c", DESCRIBE, how]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_session("the pooler's idle sessions keep the copied database in use")
@pytest.mark.skipif(bool(services.DATABASES[KIND]().missing), reason="no server")
def test_a_snapshot_copy_equals_the_migrated_database():
    assert described("copy") == described("migrated")
