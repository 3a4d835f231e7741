"""Reports that the broker accepts, accepts late, or rejects."""

import json
import threading
import time
from queue import SimpleQueue

import pytest

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.payloads import Ack, FetchRequest, failure
from django_faktory.errors import BrokerUnavailable, CommandRefused
from django_faktory.models import Job
from django_faktory.worker.reporter import MAX_SET, Reporter
from tests.factories import payload

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def report():
    """Send these reports to this broker, and wait until all are sent."""

    def send(broker, *reports):
        finished = SimpleQueue()
        for one in reports:
            finished.put(one)
        reporter = Reporter(broker, finished)
        reporter.close(time.monotonic() + 10)
        thread = threading.Thread(target=reporter.run)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    return send


@pytest.fixture
def held(report):
    """Three jobs of worker w1."""
    broker = OrmBroker("default")
    broker.push([payload() for _ in range(3)])
    [jobs] = broker.fetch([FetchRequest(queues=("default",), wid="w1", count=3)])
    return jobs


def ack(job, **changes):
    return Ack(**{"jid": job.jid, "wid": "w1", "attempt": job.attempt} | changes)


@pytest.mark.parametrize("error", [BrokerUnavailable("no database"), ValueError("a bug")])
def test_lines_that_cannot_be_stored_prevent_no_acknowledgement(report, held, error, caplog):
    class Failing(OrmBroker):
        calls = 0

        def keep_logs(self, acks):
            self.calls += 1
            raise error

    broker = Failing("default")
    report(broker, *(ack(job, log=("a line",)) for job in held))
    assert (Job.objects.count(), broker.calls) == (0, 1)
    assert "log lines could not be stored" in caplog.text


def test_no_lines_are_stored_after_the_deadline(held):
    class Forbidding(OrmBroker):
        def keep_logs(self, acks):
            raise AssertionError("acknowledgements come first")

    finished = SimpleQueue()
    finished.put(ack(held[0], log=("a line",)))
    reporter = Reporter(Forbidding("default"), finished)
    reporter.close(time.monotonic())
    reporter.run()
    assert reporter.settled_count == 1


def test_every_report_that_is_not_sent_by_the_deadline_is_logged(held, caplog):
    class Unavailable(OrmBroker):
        def ack(self, acks):
            raise BrokerUnavailable("no database")

    finished = SimpleQueue()
    for number in range(MAX_SET + 3):
        finished.put(Ack(jid=f"job-{number:05}", wid="w1", attempt=1))
    reporter = Reporter(Unavailable("default"), finished)
    reporter.close(time.monotonic())
    reporter.run()
    assert f"job-{MAX_SET + 2:05}" in caplog.text


def test_lines_are_stored_once_when_their_acknowledgement_is_repeated(report, held):
    class Interrupted(OrmBroker):
        calls = 0

        def ack(self, acks):
            self.calls += 1
            if self.calls == 1:
                raise BrokerUnavailable("no database")
            return super().ack(acks)

    Job.objects.update(result_ttl=60)
    report(Interrupted("default"), *(ack(job, log=(job.jid,)) for job in held))
    history_by_jid = dict(Job.objects.values_list("jid", "history"))
    logs_by_jid = {jid: [entry["log"] for entry in json.loads(history)] for jid, history in history_by_jid.items()}
    assert logs_by_jid == {job.jid: [[job.jid]] for job in held}


def test_a_report_waits_for_others_if_more_are_expected_soon(held):
    sets = []
    reporter = None

    class Recording(OrmBroker):
        def ack(self, acks):
            sets.append(len(acks))
            reporter.close(time.monotonic() + 10)
            return super().ack(acks)

    finished = SimpleQueue()
    others = [ack(job) for job in held[1:]]

    def more_soon():
        while others:
            finished.put(others.pop())
        return True

    reporter = Reporter(Recording("default"), finished, more_soon=more_soon)
    finished.put(ack(held[0]))
    thread = threading.Thread(target=reporter.run)
    thread.start()
    thread.join(60)
    assert sets == [3]


def test_a_report_that_breaks_the_broker_does_not_block_the_others(report, held, caplog):
    class Choking(OrmBroker):
        def ack(self, acks):
            if any(ack.jid == held[1].jid for ack in acks):
                raise RuntimeError("this one")
            return super().ack(acks)

    report(Choking("default"), *(ack(job) for job in held))
    assert [job.jid for job in Job.objects.all()] == [held[1].jid]
    assert held[1].jid in caplog.text


@pytest.mark.parametrize("late", [Ack, failure])
def test_a_late_report_is_logged_and_changes_no_job(report, held, caplog, late):
    """Check that a late report is logged and changes no job (W16, W17)."""
    report(OrmBroker("default"), late(jid=held[0].jid, wid="another", attempt=1), late(jid="never-was-there"))
    assert caplog.text.count("came too late") == 2
    assert Job.objects.get(jid=held[0].jid).state == "working"


def test_a_rejected_report_is_logged(report, held, caplog):
    class Refusing(OrmBroker):
        def fail(self, failures):
            return [CommandRefused("not today")] * len(failures)

    report(Refusing("default"), failure(jid=held[0].jid))
    assert "not today" in caplog.text
