"""Plans that a session made while the table of jobs was empty are as good when it is large, and the other way round.

A stored function keeps its plans as long as the session: no statistics make it choose again.
"""

import pytest
from django.db import connection

from django_faktory.core.payloads import Ack, Delivery, FetchRequest, failure
from django_faktory.models import Job
from django_faktory.store.dialects import dialect_of
from django_faktory.store.jobs import exchanges, failures
from django_faktory.store.store import Store
from tests.factories import JobFactory, payload
from tests.plans.recorder import Recorder
from tests.settings import KIND, VIA

psycopg = pytest.importorskip("psycopg", reason="psycopg 3 passes on the notices of auto_explain")
pytestmark = [
    pytest.mark.skipif(KIND != "postgresql", reason="the plans are PostgreSQL's"),
    pytest.mark.skipif(VIA != "", reason="auto_explain is a setting of a session"),
    pytest.mark.django_db(transaction=True),
]

JOBS = 60_000
PAGES = 400
"""Pages that a statement for five jobs may read; a walk over the table or its primary key reads thousands."""


@pytest.fixture
def recorder():
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE django_faktory_job CASCADE")  # a claim reads the dead rows of other tests
    recorder = Recorder()
    if reason := recorder.start():
        pytest.skip(reason)
    yield recorder
    recorder.stop()


def exchange(number, held, *, kept=False, key=None):
    """Acknowledge jobs, push five and claim five; return the claimed ones."""
    custom = {"lock": f"{key}-{number}"} if key else {}
    jobs = [
        payload(f"{key or 'job'}-{number}-{n}", queue="busy", result_ttl=60 if kept else None, custom=custom)
        for n in range(1 if key else 5)
    ]
    acks = [Ack(jid=job.jid, wid=job.wid, attempt=job.attempt) for job in held]
    reply = exchanges.exchange(Store(), jobs, acks, [FetchRequest(queues=("busy",), wid="w1", count=5)])
    assert reply.acked == [True] * len(acks)
    assert len(reply.fetched[0]) == len(jobs)
    return reply.fetched[0]


def report(held):
    """Confirm and extend the reservations of jobs, and fail one of them; return the others."""
    Job.objects.filter(jid__in=[job.jid for job in held]).update(claim=-1)
    dialect = dialect_of(connection)
    assert dialect.confirm(connection, [Delivery(job, 0.0) for job in held], None) == set()
    dialect.extend(connection, [(job.wid, job.jid, job.attempt) for job in held], 1e6, None)
    failed, *others = held
    assert failures.fail(Store(), [failure(jid=failed.jid, wid="w1")]) == [True]
    return others


def exchanges_of_each_kind(start):
    """Run exchanges with plain jobs, jobs that are kept, and jobs with locks, and reports about running jobs."""
    held = []
    for number in range(start, start + 4):
        held = report(exchange(number, held))
        held = exchange(100 + number, held, kept=True)
        held = exchange(200 + number, held, key="key")
    exchange(300 + start, held)


@pytest.mark.parametrize("analyzed", [True, False])
def test_exchanges_read_a_bounded_number_of_pages_while_the_table_grows_and_shrinks(recorder, analyzed):
    exchanges_of_each_kind(0)
    for state in ("enqueued", "working"):
        traits = {"working": True} if state == "working" else {"state": state, "lock_key": "other"}
        Job.objects.bulk_create(JobFactory.many(JOBS // 2, queue="other", **traits), batch_size=2000)
    if analyzed:
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE django_faktory_job")
    with recorder.during("large"):
        exchanges_of_each_kind(1000)
    Job.objects.filter(queue="other").delete()
    with recorder.during("emptied"):
        exchanges_of_each_kind(2000)
    assert len(recorder.statements) > 20
    wasteful = [str(statement) for statement in recorder.statements if statement.pages > PAGES]
    assert wasteful == []
