"""Lists in terminals of any width: names that other commands take appear whole, and times are relative."""

import json
import re
import sys
from datetime import timedelta

import pytest
from django.utils import timezone

from django_faktory.models import Batch, Limit, OutboxEntry
from tests.factories import CronFactory, JobFactory, LockFactory, QueueFactory, WorkerFactory

pytestmark = [pytest.mark.once, pytest.mark.django_db]

JID = "0199a5b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b"
BID, WID, ENTRY = "b-" + "bid" * 10, "wid-" * 8, "nightly export of all bills"
QUEUE, TASK = "billing.of.the.north", "accounting.invoices.tasks.send_the_monthly_invoice"
RUNNING = "0199a5b2-c3d4-7e5f-8a9b-0c1d2e3f4a5c"


@pytest.fixture(autouse=True)
def rows():
    now, long = timezone.now(), "a long text that says much and more, " * 9
    failure = {"errtype": "requests.exceptions.ReadTimeout", "message": f"the bank {long}", "backtrace": []}
    JobFactory(
        dead=True, jid=JID, jobtype=TASK, queue=QUEUE, errtype=failure["errtype"], about="shop.order/42", failures=3,
        payload=json.dumps({"jid": JID, "jobtype": TASK, "args": [42, "eu"], "queue": QUEUE}),
        failure=json.dumps(failure, separators=(",", ":")), finished_at=now - timedelta(minutes=3),
    )  # fmt: skip
    JobFactory(working=True, jid=RUNNING, jobtype=TASK, queue=QUEUE, wid=WID, started_at=now - timedelta(minutes=4))
    JobFactory(scheduled=True, jobtype=TASK, run_at=now + timedelta(hours=5, minutes=3))
    QueueFactory(name=QUEUE)
    WorkerFactory(wid=WID, hostname="worker-17.eu-central.example.org", queues=[QUEUE, "default"], beat_at=now)
    Batch.objects.create(bid=BID, description=long, total=3, pending=1)
    CronFactory(name=ENTRY, schedule="15 3 * * 1-5", zone="America/Argentina/Buenos_Aires", jobtype=TASK, next_at=now)
    Limit.objects.create(scope="task", name=TASK, concurrency=5)
    LockFactory(pk=12345, key=f"account {long}"[:200], jid=RUNNING, wid=WID, expires_at=now + timedelta(minutes=9))


def without_colours(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


LISTS = {
    ("jobs",): [JID, RUNNING],
    ("jobs", "--long"): [JID, RUNNING],
    ("queues",): [QUEUE],
    ("workers",): [WID],
    ("batches",): [BID],
    ("cron",): [ENTRY],
    ("limits",): [TASK],
    ("locks",): ["12345", RUNNING],
    ("errors",): [],
    ("info",): [QUEUE],
    ("top", "--once"): [RUNNING, WID, QUEUE],
}


@pytest.mark.parametrize("has_rich", [True, False], ids=["rich", "plain"])
@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_each_list_shows_names_whole_and_fits_into_the_terminal(faktory, monkeypatch, words, width, has_rich):
    monkeypatch.setenv("COLUMNS", str(width))
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    answer = faktory(*words, is_terminal=True)
    assert answer.code == 0, answer
    lines = without_colours(answer.out).splitlines()
    for name in LISTS[words]:
        assert any(re.search(rf"(^|  ){re.escape(name)}(  |$)", line) for line in lines), (name, lines)
    texts = [line for line in lines if not line.startswith(("CRITICAL", "WARNING", "processed"))]
    assert [line for line in texts if len(line) > width] == []
    assert not re.search(r"\d{4}-\d\d-\d\dT", "\n".join(texts))


@pytest.mark.django_db(databases=["default", "other"])
def test_the_outbox_shows_jids_whole(faktory, monkeypatch, settings):
    settings.FAKTORY = {"DATABASE": "other"}
    OutboxEntry.objects.create(jid=JID, queue=QUEUE, job=json.dumps({"jobtype": TASK}), error="refused " * 30)
    for width in (60, 80, 120, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = without_colours(faktory("outbox", is_terminal=True).out).splitlines()
        assert lines[1].startswith(f"{JID}  ")
        assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("width", "shown", "hidden"),
    [
        (60, [JID, "y_invoice"], ["ERROR", "ABOUT"]),
        (80, [JID, "nthly_invoice", "dead", "3 min ago", "in 5."], ["ERROR", "ABOUT", "ARGUMENTS"]),
        (120, [JID, "_monthly_invoice", "dead", "billing.", ".ReadTimeout", "3 min ago", "in 5."], ["ABOUT"]),
        (
            200,
            [JID, "_monthly_invoice", "dead", QUEUE, "3 min ago", "ReadTimeout", '[42, "eu"]', "the bank a long text"],
            [],
        ),
    ],
)
def test_a_wider_terminal_shows_more_of_the_jobs(faktory, monkeypatch, width, shown, hidden):
    monkeypatch.setenv("COLUMNS", str(width))
    out = faktory("jobs", is_terminal=True).out
    assert [text for text in shown if text not in out] == []
    assert [text for text in hidden if text in out] == []


def test_a_pipe_gets_all_columns_and_whole_names_of_any_length(faktory):
    jid = "j" * 255
    JobFactory(jid=jid, jobtype=TASK)
    lines = faktory("jobs").out.splitlines()
    assert lines[0].split() == ["JID", "TASK", "STATE", "QUEUE", "WHEN", "FAILURES", "ERROR", "ABOUT"]
    assert sum(line.startswith(f"{jid}  {TASK}") for line in lines) == 1
    assert max(len(line) for line in lines if not line.startswith(jid)) < 220
