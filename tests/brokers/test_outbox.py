"""Enqueue in a transaction while jobs are stored elsewhere: no phantom job and no lost job."""

import threading
from datetime import timedelta

import pytest
from django.db import connections, transaction
from django.test import override_settings
from django.utils import timezone

from django_faktory.brokers import get_producer, outbox
from django_faktory.brokers.orm import OrmBroker
from django_faktory.brokers.outbox import Outbox
from django_faktory.brokers.remote import RemoteBroker
from django_faktory.errors import BrokerUnavailable, FaktoryError, NotUnique
from django_faktory.models import Job, OutboxEntry
from django_faktory.runtime.outbox_relay import OutboxRelay, relay
from tests.factories import payload
from tests.project import tasks
from tests.project.models import Mark
from tests.server.conftest import serve, transport  # noqa: F401  (fixtures)
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


class Moody:
    """The real target, which can be unavailable, reject a job, or lose its reply."""

    def __init__(self, target):
        self.target = target
        self.is_away = False
        self.pushed = []

    def push(self, jobs):
        if self.is_away:
            raise BrokerUnavailable("gone fishing")
        if any("poison" in job.jid for job in jobs):
            raise RuntimeError("this one cannot be taken")
        self.pushed += [job.jid for job in jobs]
        return self.target.push(jobs)

    def close(self):
        self.target.close()


@pytest.fixture(params=["another database", "a Faktory server"])
def target(request):
    if request.param == "another database":
        yield Moody(OrmBroker("other"))
        return
    server = request.getfixturevalue("serve")(OrmBroker("other"))
    broker = RemoteBroker("tcp://{}:{}".format(*server.address))
    yield Moody(broker)
    broker.close()


@pytest.fixture
def box(target):
    return Outbox(target, ["default"], own=None)


def stored():
    return [
        jid.removeprefix("job-")
        for jid in Job.objects.using("other").order_by("enqueued_at", "id").values_list("jid", flat=True)
    ]


def waiting():
    return [jid.removeprefix("job-") for jid in OutboxEntry.objects.order_by("id").values_list("jid", flat=True)]


def test_a_job_is_there_after_the_commit_and_not_before(box):
    with transaction.atomic():
        assert box.push([payload("with-the-data")]) == [None]
        Mark.objects.create(text="data")
        assert stored() == []
    assert stored() == ["with-the-data"]
    assert waiting() == []


def test_what_is_rolled_back_was_never_there(box):
    with transaction.atomic():
        box.push([payload("phantom-job")])
        transaction.set_rollback(True)
    assert (stored(), waiting()) == ([], [])


def test_a_savepoint_that_is_rolled_back_takes_its_jobs_along(box):
    with transaction.atomic():
        box.push([payload("real-job")])
        with transaction.atomic():
            box.push([payload("phantom-job")])
            transaction.set_rollback(True)
    assert (stored(), waiting()) == (["real-job"], [])


def test_everything_known_of_a_job_arrives(box):
    job = payload("with-all-of-it", priority=-13, retry=3, reserve_for=120, result_ttl=77, args=[2**70, "é\x00", 1.0])
    with transaction.atomic():
        box.push([job])
    row = Job.objects.using("other").get()
    assert row.payload == job.text
    assert (row.retry, row.reserve_for, row.result_ttl) == (3, 120, 77)
    if isinstance(box.target.target, OrmBroker):
        assert row.priority == -13


def test_outside_of_a_transaction_it_goes_at_once(box):
    assert box.push([payload("at-once-then")]) == [None]
    assert stored() == ["at-once-then"]


def test_a_target_that_is_away_loses_nothing_and_keeps_the_order(box, target):
    target.is_away = True
    names = [f"waits-{number}" for number in range(5)]
    for name in names[:4]:
        with transaction.atomic():
            box.push([payload(name)])
    box.push([payload(names[4])])
    assert (stored(), waiting()) == ([], names)
    assert not OutboxRelay(box).run_once()
    target.is_away = False
    assert OutboxRelay(box).run_once()
    assert (stored(), waiting()) == (names, [])


def test_after_a_failure_callers_do_not_wait_for_the_target_again(box, target):
    target.is_away = True
    with transaction.atomic():
        box.push([payload("notices-it")])
    target.is_away = False
    with transaction.atomic():
        box.push([payload("leaves-it-to-the-relay")])
    assert waiting() == ["notices-it", "leaves-it-to-the-relay"]
    OutboxRelay(box).run_once()
    assert stored() == ["notices-it", "leaves-it-to-the-relay"]


def test_who_dies_after_handing_on_leaves_a_lease_and_no_double(box, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(outbox.outbox, "settle", lambda **_: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit), transaction.atomic():
            box.push([payload("handed-on")])
    assert (stored(), waiting()) == (["handed-on"], ["handed-on"])
    OutboxRelay(box).run_once()
    assert waiting() == ["handed-on"], "the lease still runs"
    OutboxEntry.objects.update(leased_until=timezone.now() - timedelta(seconds=1))
    OutboxRelay(box).run_once()
    assert (stored(), waiting()) == (["handed-on"], [])


def test_two_relays_at_once_hand_each_job_on_once_and_in_order(box, target):
    target.is_away = True
    for number in range(30):
        with transaction.atomic():
            box.push([payload(f"{number:05d}")])
    target.is_away = False

    def work():
        try:
            OutboxRelay(box).run_once()
        finally:
            connections.close_all()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert target.pushed == [f"job-{number:05d}" for number in range(30)]
    assert waiting() == []


def test_a_row_that_cannot_be_taken_stays_for_a_person_and_holds_up_no_other(box, target, caplog):
    target.is_away = True
    with transaction.atomic():
        box.push([payload("good-one-1"), payload("poison-job"), payload("good-one-2")])
        OutboxEntry.objects.create(jid="garbage", queue="default", job="{no job")
    target.is_away = False
    OutboxRelay(box).run_once()
    assert stored() == ["good-one-1", "good-one-2"]
    errors = dict(OutboxEntry.objects.values_list("jid", "error"))
    assert errors["job-poison-job"] == "RuntimeError: this one cannot be taken"
    assert errors["garbage"] == "cannot be read: it is no job's JSON"
    assert caplog.text.count("was refused") == 2
    assert OutboxRelay(box).run_once()


def test_one_that_is_not_unique_is_dropped_as_the_target_says(box, target, monkeypatch):
    monkeypatch.setattr(target, "push", lambda jobs: [NotUnique(job.jid) for job in jobs])
    with transaction.atomic():
        box.push([payload("second-of-its-kind")])
    assert waiting() == []


def test_a_broken_target_is_refused_with_its_own_words(box, target, monkeypatch):
    monkeypatch.setattr(target, "push", lambda jobs: [FaktoryError("no room for it") for _ in jobs])
    with transaction.atomic():
        box.push([payload("no-room-for-it")])
    assert OutboxEntry.objects.get().error == "no room for it"


def test_the_relay_loop_hands_on_and_ends(box, target):
    target.is_away = True
    with transaction.atomic():
        box.push([payload("for-the-loop")])
    target.is_away = False
    loop = OutboxRelay(box)
    thread = threading.Thread(target=loop.run)
    thread.start()
    wait_until(lambda: stored() == ["for-the-loop"])
    loop.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_in_a_transaction_of_the_jobs_own_database_no_row_is_needed():
    box = Outbox(OrmBroker("other"), ["default"], own="other")
    with transaction.atomic(using="other"):
        box.push([payload("in-its-own-tx")])
        assert waiting() == []
        transaction.set_rollback(True, using="other")
    assert stored() == []


class TestSettings:
    def test_jobs_in_the_same_database_need_none(self):
        assert isinstance(get_producer(), OrmBroker)
        assert relay() is None

    def test_jobs_in_another_database_go_by_the_default_ones_outbox(self):
        with override_settings(FAKTORY={"DATABASE": "other"}):
            with transaction.atomic():
                result = tasks.add.enqueue(1, 2)
                assert stored() == []
            assert stored() == [result.id]
            assert isinstance(relay(), OutboxRelay)

    def test_transactions_of_several_databases_can_have_one(self):
        with override_settings(FAKTORY={"OUTBOX": ["other"]}):
            with transaction.atomic(using="other"):
                result = tasks.add.enqueue(1, 2)
                assert not Job.objects.exists()
            assert Job.objects.get().jid == result.id
            with transaction.atomic():
                tasks.add.enqueue(3, 4)
                transaction.set_rollback(True)
            assert Job.objects.count() == 1

    def test_it_can_be_switched_off(self):
        with override_settings(FAKTORY={"DATABASE": "other", "OUTBOX": []}):
            assert isinstance(get_producer(), OrmBroker)

    def test_without_the_app_there_is_no_table_for_it(self):
        with override_settings(INSTALLED_APPS=[], FAKTORY={"BROKER": "remote"}):
            assert isinstance(get_producer(), RemoteBroker)
