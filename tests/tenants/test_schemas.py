"""Jobs of tenants in schemas of one database, by django-tenants: enqueued, run and shown in their schema only."""

import json
import re
from contextlib import closing

import pytest

from tests.programs import Program
from tests.server.raw import RawClient, push
from tests.server.raw import worker as hello
from tests.tenants.conftest import TENANTS
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

ALTERNATE = """
from contextlib import nullcontext
from django.db import connection, transaction
from tests.tenants.notes.tasks import note, note_in_transaction
for number in range({times}):
    connection.set_schema(("acme", "bolt")[number % 2])
    with {around}:
        note.enqueue(f"{{connection.schema_name}}-{{number}}")
"""

REQUESTS = """
from django.test import Client
client = Client()
asked = [client.get("/enqueue/", HTTP_HOST=f"{schema}.test") for schema in ("acme", "bolt") * 10]
print(json.dumps([answer.json()["schema"] for answer in asked]))
"""

ADMIN = """
from django.contrib.auth import get_user_model
from django.test import Client
from django_tenants.utils import schema_context
from tests.tenants.notes.tasks import note
found = {}
for schema in ("acme", "bolt"):
    with schema_context(schema):
        user, _ = get_user_model().objects.get_or_create(username="admin", is_staff=True, is_superuser=True)
        jid = note.enqueue(f"of {schema}").id
        client = Client(HTTP_HOST=f"{schema}.test")
        client.force_login(user)
    page = client.get("/admin/django_faktory/job/")
    found[schema] = [page.status_code, jid, page.content.decode()]
print(json.dumps(found))
"""


def jids_of_words(project, table):
    return [word for (word,) in project.rows(f"SELECT payload::json->'args'->>0 FROM {table} ORDER BY id")]


@pytest.mark.parametrize("around", ["nullcontext()", "transaction.atomic()"])
def test_jobs_of_two_tenants_enqueued_alternately_are_in_their_schemas(own_queues, around):
    own_queues.python(ALTERNATE.format(times=20, around=around))
    for place, schema in enumerate(TENANTS):
        words = jids_of_words(own_queues, f"{schema}.django_faktory_job")
        assert words == [f"{schema}-{number}" for number in range(place, 20, 2)]


def test_jobs_of_two_tenants_in_one_transaction_are_in_their_schemas(own_queues):
    loop = ALTERNATE.format(times=20, around="nullcontext()").strip().splitlines()
    body = [*loop[:3], "with transaction.atomic():", *("    " + line for line in loop[3:])]
    own_queues.python("\n".join(body))
    for schema in TENANTS:
        assert own_queues.count(f"{schema}.django_faktory_job", f"payload LIKE '%{schema}%'") == 10


def test_alternating_requests_store_jobs_in_the_schema_of_their_host(own_queues):
    assert own_queues.python(REQUESTS) == [*TENANTS] * 10
    for schema in TENANTS:
        words = jids_of_words(own_queues, f"{schema}.django_faktory_job")
        assert words == [f"{schema}-autocommit", f"{schema}-atomic"] * 10


def test_a_worker_of_a_schema_runs_only_jobs_of_its_tenant(own_queues, runfaktory):
    acme = runfaktory(own_queues, "--processes", "1", "127.0.0.1:0", TENANT_SCHEMA="acme")
    acme.wait_for_log("server listens")
    own_queues.python(ALTERNATE.format(times=20, around="nullcontext()"))
    wait_until(lambda: len(own_queues.words("acme")) == 10, 60)
    assert own_queues.words("bolt") == []
    assert own_queues.count("bolt.django_faktory_job", "state = 'enqueued'") == 10

    runfaktory(own_queues, "--processes", "1", "127.0.0.1:0", TENANT_SCHEMA="bolt")
    wait_until(lambda: len(own_queues.words("bolt")) == 10, 60)
    for schema in TENANTS:
        assert own_queues.words(schema) == sorted(
            f"{schema}-{number}" for number in range(20) if number % 2 == TENANTS.index(schema)
        )
        wait_until(lambda: own_queues.count(f"{schema}.django_faktory_history", "state = 'succeeded'") == 10)  # noqa: B023
    assert "Traceback" not in acme.text


def test_a_worker_of_a_schema_runs_atomic_unique_and_locked_tasks(own_queues, runfaktory):
    own_queues.python(
        "from django_tenants.utils import schema_context\n"
        "from tests.tenants.notes import tasks\n"
        "for schema in ('acme', 'bolt'):\n"
        "    with schema_context(schema):\n"
        "        for one in (tasks.note_in_transaction, tasks.note_once, tasks.note_alone):\n"
        "            one.enqueue(f'{schema} {one.func.__name__}')\n"
        "        tasks.note_alone.enqueue(f'{schema} again')\n"
    )
    program = runfaktory(own_queues, "--processes", "1", "127.0.0.1:0", TENANT_SCHEMA="bolt")
    expected = ["bolt again", "bolt note_alone", "bolt note_in_transaction", "bolt note_once"]
    wait_until(lambda: own_queues.words("bolt") == expected, 60)
    wait_until(lambda: own_queues.count("bolt.django_faktory_history", "state = 'succeeded'") == 4)
    assert own_queues.words("acme") == []
    assert "Traceback" not in program.text


def test_a_schema_set_on_only_one_connection_is_rejected(own_queues):
    program = Program(
        "-W", "ignore", "-m", "django", "tenant_command", "runfaktory", "--schema=acme", "127.0.0.1:0",
        **own_queues.environment,
    )  # fmt: skip
    try:
        assert program.code(60) == 1
        program.wait_for_log("the schema 'acme' is set on one connection only", "docs/howto/multi-tenant.md")
    finally:
        program.clean_up()


def test_a_protocol_client_uses_the_schema_of_its_server(own_queues, runfaktory):
    program = runfaktory(own_queues, "--server-only", "127.0.0.1:0", TENANT_SCHEMA="acme")
    [line] = program.wait_for_log("server listens")
    host, port = re.search(r"address=(\S+):(\d+)", line).groups()
    with closing(RawClient.identified((host, int(port)), **hello("w"))) as worker:
        for number in range(5):
            assert worker.ask(push(jid=f"by-wire-{number}", queue="q", args=[number])) == b"+OK"
        assert own_queues.count("acme.django_faktory_job") == 5
        assert own_queues.count("bolt.django_faktory_job") == 0
        for number in range(5):
            job = json.loads(worker.ask("FETCH q"))
            assert job["args"] == [number]
            assert worker.ask(f'ACK {{"jid":"{job["jid"]}"}}') == b"+OK"
    assert own_queues.count("acme.django_faktory_job", "state = 'working'") == 0


def test_the_admin_of_each_tenant_shows_only_its_jobs(own_queues):
    found = own_queues.python(ADMIN)
    for schema, other in (TENANTS, TENANTS[::-1]):
        status, jid, text = found[schema]
        assert (status, jid in text, found[other][1] in text) == (200, True, False)


def test_a_process_with_a_tenant_schema_counts_only_jobs_of_that_schema(own_queues):
    own_queues.python(ALTERNATE.format(times=3, around="nullcontext()"))
    listed = "from django_faktory.models import Job\nprint(json.dumps(Job.objects.count()))"
    assert [own_queues.python(listed, TENANT_SCHEMA=schema) for schema in TENANTS] == [2, 1]


def test_a_shared_queue_passes_the_schema_to_the_task(shared_queue, runfaktory):
    shared_queue.python(ALTERNATE.format(times=20, around="nullcontext()"))
    shared_queue.python(
        ALTERNATE.format(times=4, around="transaction.atomic()").replace("note.", "note_in_transaction.")
    )
    assert shared_queue.count("public.django_faktory_job") == 24
    program = runfaktory(shared_queue, "--processes", "1", "127.0.0.1:0")
    wait_until(lambda: shared_queue.count("public.django_faktory_history", "state = 'succeeded'") == 24, 60)
    for place, schema in enumerate(TENANTS):
        numbers = [*range(place, 20, 2), *range(place, 4, 2)]
        assert shared_queue.words(schema) == sorted(f"{schema}-{number}" for number in numbers)
    assert "Traceback" not in program.text


def test_the_system_check_reports_the_slower_path(own_queues):
    found = own_queues.python(
        "from django.core.checks import run_checks\nprint(json.dumps([one.id for one in run_checks()]))"
    )
    assert [one for one in found if one.startswith("django_faktory")] == ["django_faktory.I001"]
