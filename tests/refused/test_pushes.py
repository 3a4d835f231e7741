"""The database refuses jobs, batches and outbox rows: the caller gets the reason, and every other job is stored."""

import json

import pytest
from django.db import connection, transaction

from django_faktory.brokers.orm import OrmBroker
from django_faktory.brokers.outbox import Outbox
from django_faktory.core.payloads import NewBatch, TrackUpdate
from django_faktory.errors import InvalidPayload
from django_faktory.models import Job, OutboxEntry
from django_faktory.store import outbox
from tests.factories import payload
from tests.refused import tasks

REASON = "invalid payload: the database cannot store a "


def jids():
    return set(Job.objects.values_list("jid", flat=True))


def test_enqueue_raises_invalid_payload(narrow, guilty):
    with pytest.raises(InvalidPayload, match=REASON):
        tasks.plain.enqueue("", guilty)
    with pytest.raises(InvalidPayload, match=REASON), transaction.atomic():
        tasks.plain.enqueue("", guilty)
    assert not Job.objects.exists()


def test_a_set_of_jobs_is_stored_without_the_one_that_is_refused(narrow, guilty):
    jobs = [payload(args=[guilty] if number == 5 else []) for number in range(12)]
    answers = OrmBroker("default").push(jobs)
    assert [type(answer) for answer in answers] == [
        InvalidPayload if number == 5 else type(None) for number in range(12)
    ]
    assert jids() == {job.jid for number, job in enumerate(jobs) if number != 5}


def test_a_set_of_unique_jobs_is_stored_without_the_one_that_is_refused(narrow, guilty):
    # Arguments that are compared have at most 64 KiB: the rest of the large value is in `custom`.
    jobs = [payload(args=[number], custom={"unique_for": 60}) for number in range(12)]
    jobs[5] = payload(args=[guilty[:60_000]], custom={"unique_for": 60, "note": guilty[:1_030_000]})
    answers = OrmBroker("default").push(jobs)
    assert [type(answer) for answer in answers] == [
        InvalidPayload if number == 5 else type(None) for number in range(12)
    ]


def test_a_push_is_answered_with_the_reason_and_a_failure_is_recorded(narrow, guilty, connect):
    client = connect()
    refused = {"jid": "refused-1", "jobtype": "noop", "args": [guilty]}
    stored = [{"jid": f"stored-{number}", "jobtype": "noop", "args": []} for number in range(3)]
    assert client.ask(f"PUSH {json.dumps(refused, ensure_ascii=False)}").startswith(f"-ERR {REASON}".encode())
    [answer] = json.loads(client.ask(f"PUSHB {json.dumps([*stored, refused], ensure_ascii=False)}")).values()
    assert answer.startswith(REASON)
    assert jids() == {job["jid"] for job in stored}
    jid = json.loads(client.ask("FETCH default"))["jid"]
    report = {"jid": jid, "errtype": guilty[:100], "message": guilty[:900], "backtrace": [guilty[:900]] * 30}
    assert client.ask(f"FAIL {json.dumps(report, ensure_ascii=False)}") == b"+OK"
    assert Job.objects.get(jid=jid).failures == 1


def test_a_batch_whose_description_is_refused_is_answered_with_the_reason(narrow, guilty):
    with pytest.raises(InvalidPayload, match=REASON):
        OrmBroker("default").new_batch(NewBatch(description=guilty, complete=payload()))


def test_progress_that_is_refused_is_stored_in_ascii(narrow, guilty):
    broker = OrmBroker("default")
    job = payload()
    broker.push([job])
    broker.track_set([TrackUpdate(jid=job.jid, percent=50, desc=guilty[:10])])
    [tracked] = broker.track_get([job.jid])
    assert tracked.percent == 50
    assert tracked.desc.isascii()


def test_an_outbox_row_that_is_refused_raises_and_one_that_the_target_refuses_is_kept(narrow, guilty):
    with pytest.raises(InvalidPayload, match=REASON):
        outbox.add([payload(args=[guilty])], using="default")

    class Refusing(OrmBroker):
        def push(self, jobs):
            return [InvalidPayload(f"refused: {guilty}") for _ in jobs]

    outbox.add([payload(), payload()], using="default")
    Outbox(Refusing("default"), ["default"], own_alias=None).relay("default")
    assert [row.error.startswith("refused: ") for row in OutboxEntry.objects.all()] == [True, True]


@pytest.mark.skipif(connection.vendor == "sqlite", reason="names are not limited")
def test_a_name_that_is_too_long_for_its_column_is_refused(narrow):
    [answer] = OrmBroker("default").push([payload(jid="x" * 300)])
    assert str(answer).startswith(f"{REASON}value that is too long")
