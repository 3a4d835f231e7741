"""Create a database with django-tenants for each layout, and run programs with its settings."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress

import pytest

from tests import services
from tests.docs.pages import DOCS, examples
from tests.programs import ROOT, Program
from tests.settings import DATABASES, KIND, TAG, VIA

PAGE = DOCS / "howto" / "multi-tenant.md"
TENANTS = ("acme", "bolt")
PREPARE = f"""
from django.core.management import call_command
call_command("migrate_schemas", shared=True, verbosity=0)
from tests.tenants.customers.models import Customer, Domain
for schema in ("public", *{TENANTS!r}):
    customer = Customer.objects.create(schema_name=schema, name=schema)
    Domain.objects.create(domain=f"{{schema}}.test", tenant=customer)
"""


def of_page(heading):
    """Yield path and code of the files in a section of the page: the first line of each Python block is its path."""
    text = PAGE.read_text(encoding="utf-8")
    begin = text[: text.index(f"\n## {heading}\n")].count("\n") + 2
    end = text[: text.find("\n## ", text.index(f"\n## {heading}\n") + 1)].count("\n") + 1
    for example in examples(PAGE):
        if begin < example.line <= end:
            yield re.match(r"# (\S+)", example.code)[1], example.code


class Project:
    """One layout of the project, over a database of its own."""

    def __init__(self, layout, heading, folder):
        self.name = f"test_faktory_{TAG}_{layout}_{os.environ.get('PYTEST_XDIST_WORKER', '')}".rstrip("_")
        self._folder = folder
        self._write(heading)
        self.environment = {
            "DJANGO_SETTINGS_MODULE": "tests.tenants.settings",
            "FAKTORY_TENANTS_LAYOUT": layout,
            "FAKTORY_TENANTS_NAME": self.name,
            "FAKTORY_TENANTS_PAGE": str(folder),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
        }
        self._on_server(f'DROP DATABASE IF EXISTS "{self.name}" WITH (FORCE)', f'CREATE DATABASE "{self.name}"')

    def _write(self, heading):
        for number, (path, code) in enumerate(of_page(heading)):
            target = self._folder / (f"settings_{number}.py" if path == "settings.py" else path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(code)
        for package in {path.parent for path in self._folder.rglob("*/*.py")}:
            (package / "__init__.py").touch()

    def drop(self):
        self._on_server(f'DROP DATABASE IF EXISTS "{self.name}" WITH (FORCE)')

    def _on_server(self, *statements):
        with self.connect("postgres") as connection:
            for statement in statements:
                connection.execute(statement)

    def connect(self, name=None):
        import psycopg  # not importable if the tests run with psycopg2

        at = DATABASES["default"]
        return psycopg.connect(
            host=at["HOST"], port=at["PORT"], user=at["USER"], password=at["PASSWORD"], dbname=name or self.name,
            autocommit=True,
        )  # fmt: skip

    def python(self, code, **environment):
        """Run code with the project's settings; return the JSON in its last line of output."""
        code = f"import django, json\ndjango.setup()\n{code}"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=500,
            env={**os.environ, **self.environment, **environment}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]) if "json.dumps(" in code else None

    def words(self, schema):
        """Return the words that the tasks wrote into the table of this tenant."""
        return sorted(word for (word,) in self.rows(f"SELECT word FROM {schema}.notes_note"))

    def rows(self, sql):
        with self.connect() as connection:
            return connection.execute(sql).fetchall()

    def count(self, table, condition="TRUE"):
        [(found,)] = self.rows(f"SELECT COUNT(*) FROM {table} WHERE {condition}")
        return found

    def empty(self):
        """Delete all jobs and notes."""
        with self.connect() as connection:
            tables = connection.execute(
                "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables"
                " WHERE schemaname IN ('public', 'acme', 'bolt')"
                " AND tablename IN ('django_faktory_job', 'django_faktory_history', 'notes_note')"
            ).fetchall()
            connection.execute(f"TRUNCATE {', '.join(table for (table,) in tables)} CASCADE")


@pytest.fixture(scope="session")
def _needed():
    if KIND != "postgresql" or VIA:
        pytest.skip("about PostgreSQL, with a session for each connection")
    if (service := services.postgresql()).missing:
        pytest.skip(service.missing)
    pytest.importorskip("django_tenants")


def _project(layout, heading, folder):
    project = Project(layout, heading, folder)
    try:
        project.python(PREPARE)
        yield project
    finally:
        project.drop()


@pytest.fixture(scope="session")
def _own_queues(_needed, tmp_path_factory):
    yield from _project("own", "One queue for each tenant", tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="session")
def _shared_queue(_needed, tmp_path_factory):
    yield from _project("shared", "One queue for all tenants", tmp_path_factory.mktemp("shared"))


@pytest.fixture
def own_queues(_own_queues):
    """The project with django_faktory in TENANT_APPS."""
    _own_queues.empty()
    return _own_queues


@pytest.fixture
def shared_queue(_shared_queue):
    """The project with django_faktory in SHARED_APPS."""
    _shared_queue.empty()
    return _shared_queue


@pytest.fixture
def runfaktory():
    """Start the command in a project. All programs are ended after the test."""
    programs = []

    def start(project, *args, **environment):
        program = Program("-W", "ignore", "-m", "django", "runfaktory", *args, **{**project.environment, **environment})
        programs.append(program)
        return program

    yield start
    for program in programs:
        with suppress(ProcessLookupError):
            program.clean_up()
        print(f"--- {program.pid}\n{program.text}")  # noqa: T201  (shown where the test failed)
