"""Messages about alarms: sent once, repeated, resolved, and sent again after a failure."""

import json
import threading
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from django.core import mail
from django.core.mail import send_mail
from django.core.mail.backends.base import BaseEmailBackend
from django.db.models import F

from django_faktory.models import AlarmRecord, Queue
from django_faktory.operations import alarms
from django_faktory.runtime import alarm_notifier
from django_faktory.runtime.alarm_notifier import AlarmNotifier, make_alarm_notifier
from django_faktory.runtime.maintenance import Maintenance
from django_faktory.store import shared_reads
from django_faktory.store.jobs import failures
from django_faktory.store.store import Store
from tests.factories import JobFactory, QueueFactory, WorkerFactory
from tests.operations.test_alarms import ago, running_worker, waiting

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]


@pytest.fixture(autouse=True)
def addresses(settings):
    settings.FAKTORY = {**getattr(settings, "FAKTORY", {}), "ALARM_EMAILS": ["on-call@example.org"]}


NEVER_SLOW = {"slow_s": float("inf")}
"""On a busy machine the database is slow for a moment, and its alarm and the end of it are messages too."""


def notifier(**options):
    return AlarmNotifier("default", **{"confirm_s": 0, "pause_s": 0, **NEVER_SLOW, **options})


def pause_a_queue(name="mail"):
    running_worker(f"worker of {name}")
    waiting(name, minutes=1)
    Queue.objects.update(paused_at=ago(minutes=5))


def let_pass(**duration):
    """Make the records older, and the shared counts outdated."""
    shared_reads.forget()
    AlarmRecord.objects.update(began_at=F("began_at") - timedelta(**duration))
    AlarmRecord.objects.filter(notified_at__isnull=False).update(notified_at=F("notified_at") - timedelta(**duration))


class Receiver(HTTPServer):
    """A webhook that answers with `status` and keeps the documents."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.documents = 200, []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/hook"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.documents.append(json.loads(text))
        if self.server.status is None:
            self.wfile.write(b"no HTTP\r\n\r\n")
            return
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def webhook(settings):
    receiver = Receiver()
    thread = threading.Thread(target=receiver.serve_forever)
    thread.start()
    settings.FAKTORY = {**settings.FAKTORY, "ALARM_EMAILS": [], "ALARM_WEBHOOK": receiver.url}
    yield receiver
    receiver.shutdown()
    thread.join()
    receiver.server_close()


def test_an_alarm_is_sent_once():
    pause_a_queue()
    assert notifier().run_once()
    assert not notifier().run_once()
    [message] = mail.outbox
    assert message.subject == "[Faktory] WARNING: Queue mail is paused; waiting: 1"
    assert message.to == ["on-call@example.org"]
    assert "No worker gets its jobs until the queue is resumed." in message.body


def test_the_alarm_of_a_slow_database_is_sent():
    assert notifier(slow_s=0).run_once()
    [message] = mail.outbox
    assert message.subject.startswith("[Faktory] WARNING: The database needs ")


def test_one_message_has_all_alarms_with_the_critical_ones_first():
    pause_a_queue()
    waiting("accounts", minutes=13)
    assert notifier().run_once()
    [message] = mail.outbox
    assert message.subject == "[Faktory] CRITICAL: No worker takes jobs of queue accounts; waiting: 1 and 1 more"
    assert message.body.index("accounts") < message.body.index("mail")


def test_an_alarm_is_sent_when_it_has_lasted():
    pause_a_queue()
    assert not notifier(confirm_s=3600).run_once()
    let_pass(minutes=55)
    assert not notifier(confirm_s=3600).run_once()
    let_pass(minutes=5)
    assert notifier(confirm_s=3600).run_once()


def test_a_lasting_alarm_is_repeated():
    pause_a_queue()
    assert notifier().run_once()
    let_pass(hours=3, minutes=59)
    assert not notifier().run_once()
    let_pass(minutes=2)
    assert notifier().run_once()
    assert len(mail.outbox) == 2


def test_the_end_of_an_alarm_is_sent_if_its_beginning_was():
    pause_a_queue()
    notifier().run_once()
    Queue.objects.update(paused_at=None)
    assert notifier().run_once()
    assert not notifier().run_once()
    assert mail.outbox[1].subject == "[Faktory] Resolved: Queue mail is paused; waiting: 1"
    pause_a_queue("short")
    notifier(confirm_s=60).run_once()
    Queue.objects.update(paused_at=None)
    assert not notifier(confirm_s=60).run_once()
    assert len(mail.outbox) == 2


def test_an_alarm_that_begins_again_during_the_pause_must_last_again():
    options = {"confirm_s": 60, "pause_s": 300}
    pause_a_queue()
    notifier(**options).run_once()
    let_pass(seconds=61)
    assert notifier(**options).run_once()
    pause_a_queue("other")
    notifier(**options).run_once()
    Queue.objects.filter(name="other").update(paused_at=None)
    notifier(**options).run_once()
    let_pass(seconds=301)
    Queue.objects.filter(name="other").update(paused_at=ago(seconds=1))
    assert not notifier(**options).run_once()


def test_a_message_that_could_not_be_sent_is_sent_at_the_next_look(settings, webhook):
    settings.FAKTORY = {**settings.FAKTORY, "ALARM_EMAILS": []}
    pause_a_queue()
    webhook.status = 503
    assert not notifier(pause_s=300).run_once()
    webhook.status = 200
    assert notifier(pause_s=300).run_once()
    for is_paused in (True, False):  # a repetition, then the end of the alarm
        Queue.objects.update(paused_at=ago(minutes=5) if is_paused else None)
        let_pass(hours=5)
        webhook.status = 503
        assert not notifier().run_once()
        webhook.status = 200
        assert notifier().run_once()
    assert webhook.documents[-1]["resolved"] == ["Queue mail is paused; waiting: 1"]


class OwnError(Exception):
    """An error of a mail backend that is no error of SMTP or of the network."""


class Killed(BaseException):
    """Ends the notifier as SIGKILL does: nothing after it runs."""


class BrokenBackend(BaseEmailBackend):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def send_messages(self, messages):
        raise self.error


@pytest.fixture
def broken_mail(monkeypatch):
    """Return a context manager within which sending a mail raises this error."""

    @contextmanager
    def break_mail(error):
        with monkeypatch.context() as patch:
            patch.setattr(alarm_notifier, "send_mail", partial(send_mail, connection=BrokenBackend(error)))
            yield

    return break_mail


@pytest.fixture
def both_ways(settings, webhook):
    settings.FAKTORY = {**settings.FAKTORY, "ALARM_EMAILS": ["on-call@example.org"]}
    return webhook


@pytest.mark.parametrize("status", [None, 503])
def test_a_webhook_that_failed_is_tried_again_and_the_mail_is_not_sent_again(both_ways, status):
    pause_a_queue()
    both_ways.status = status
    assert notifier(pause_s=300).run_once(), "the e-mail was sent"
    both_ways.status = 200
    assert notifier(pause_s=300).run_once()
    assert not notifier(pause_s=300).run_once()
    assert (len(mail.outbox), len(both_ways.documents)) == (1, 2)
    Queue.objects.update(paused_at=None)
    both_ways.status = status
    assert notifier().run_once()
    both_ways.status = 200
    assert notifier().run_once()
    assert both_ways.documents[-1]["resolved"] == ["Queue mail is paused; waiting: 1"]
    assert len(mail.outbox) == 2


def test_a_mail_backend_that_raises_an_error_of_its_own_stops_neither_the_webhook_nor_the_loop(both_ways, broken_mail):
    pause_a_queue()
    with broken_mail(OwnError("no route")):
        assert notifier().run_once(), "the webhook was called"
        assert not notifier().run_once()
    assert notifier().run_once()
    assert (len(mail.outbox), len(both_ways.documents)) == (1, 1)


def test_the_message_of_a_node_that_was_killed_while_it_sent_is_sent_by_another_after_a_minute(broken_mail):
    pause_a_queue()
    with broken_mail(Killed()), pytest.raises(Killed):
        notifier().run_once()
    assert not notifier().run_once(), "the claim of the first node has not lapsed"
    AlarmRecord.objects.update(claimed_until=F("claimed_until") - timedelta(seconds=61))
    assert notifier().run_once()
    assert len(mail.outbox) == 1


def test_there_is_a_pause_between_two_messages():
    pause_a_queue()
    assert notifier().run_once()
    pause_a_queue("other")
    assert not notifier(pause_s=300).run_once()
    let_pass(seconds=301)
    assert notifier(pause_s=300).run_once()
    assert "other" in mail.outbox[1].subject


def test_of_many_nodes_one_sends_the_message():
    pause_a_queue()
    sent, barrier = [], threading.Barrier(4)

    def look():
        from django.db import connection

        barrier.wait(60)
        sent.append(notifier().run_once())
        connection.close()

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(sent) == [False, False, False, True]
    assert len(mail.outbox) == 1


def test_a_webhook_receives_the_alarms_as_json(webhook):
    pause_a_queue()
    assert notifier().run_once()
    [document] = webhook.documents
    [alarm] = document["alarms"]
    assert (alarm["kind"], alarm["subject"], alarm["affected"]) == ("paused-queue", "mail", 1)
    assert document["resolved"] == []
    assert document["text"].startswith("WARNING: Queue mail is paused")
    assert not mail.outbox


def test_a_name_with_a_line_break_does_not_end_the_header():
    running_worker()
    JobFactory(queue="a\nBcc: b@example.org", enqueued_at=ago(minutes=9))
    QueueFactory(name="a\nBcc: b@example.org")
    assert notifier().run_once()
    [message] = mail.outbox
    assert "\n" not in message.subject
    assert set(message.message().keys()).isdisjoint({"Bcc", "Cc"})


def test_a_lost_worker_is_reported_for_an_hour():
    running_worker()
    WorkerFactory(wid="w-lost", hostname="app-2", pid=77, beat_at=ago(minutes=5))
    JobFactory(working=True, wid="w-lost", enqueued_at=ago(seconds=1))
    assert failures.reclaim_lost(Store(), ["w-lost"]) == 1
    [alarm] = alarms.read_now(using="default", **NEVER_SLOW)
    assert (alarm.kind, alarm.subject, alarm.text) == ("lost-worker", "w-lost", "Worker app-2:77 was lost")
    let_pass(minutes=61)
    assert alarms.read_now(using="default", **NEVER_SLOW) == []
    let_pass(minutes=61)
    Maintenance("default").run_once()
    assert not AlarmRecord.objects.exists()


def test_nothing_runs_without_a_destination(settings):
    settings.FAKTORY = {**settings.FAKTORY, "ALARM_EMAILS": []}
    assert make_alarm_notifier("default") is None
