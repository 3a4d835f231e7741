"""Enqueue in a transaction while jobs are stored elsewhere: no phantom job and no lost job."""

import math
import threading
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.db import connections, transaction
from django.test import override_settings
from django.utils import timezone

from django_faktory.brokers import get_producer, outbox
from django_faktory.brokers.orm import OrmBroker
from django_faktory.brokers.outbox import Outbox
from django_faktory.brokers.remote import RemoteBroker
from django_faktory.errors import BrokerUnavailable, FaktoryError, NotUnique, ResultTimeout
from django_faktory.models import Job, OutboxEntry
from django_faktory.runtime.outbox_relay import OutboxRelay, make_outbox_relay
from django_faktory.tasks.compat import TaskResultDoesNotExist
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
    return Outbox(target, ["default"], own_alias=None)


def stored():
    return [
        jid.removeprefix("job-")
        for jid in Job.objects.using("other").order_by("enqueued_at", "id").values_list("jid", flat=True)
    ]


def waiting():
    return [jid.removeprefix("job-") for jid in OutboxEntry.objects.order_by("id").values_list("jid", flat=True)]


def test_a_job_is_stored_at_the_target_only_after_the_commit(box):
    with transaction.atomic():
        assert box.push([payload("with-the-data")]) == [None]
        Mark.objects.create(text="data")
        assert stored() == []
    assert stored() == ["with-the-data"]
    assert waiting() == []


def test_a_rolled_back_job_is_never_stored(box):
    with transaction.atomic():
        box.push([payload("phantom-job")])
        transaction.set_rollback(True)
    assert (stored(), waiting()) == ([], [])


def test_jobs_of_a_rolled_back_savepoint_are_discarded(box):
    with transaction.atomic():
        box.push([payload("real-job")])
        with transaction.atomic():
            box.push([payload("phantom-job")])
            transaction.set_rollback(True)
    assert (stored(), waiting()) == (["real-job"], [])


def test_all_options_of_a_job_reach_the_target(box):
    job = payload("with-all-of-it", priority=-13, retry=3, reserve_for=120, result_ttl=77, args=[2**70, "é\x00", 1.0])
    with transaction.atomic():
        box.push([job])
    row = Job.objects.using("other").get()
    assert row.payload == job.text
    assert (row.retry, row.reserve_for, row.result_ttl) == (3, 120, 77)
    if isinstance(box.target.target, OrmBroker):
        assert row.priority == -13


def test_a_job_outside_a_transaction_is_pushed_at_once(box):
    assert box.push([payload("at-once-then")]) == [None]
    assert stored() == ["at-once-then"]


def test_jobs_survive_an_unavailable_target_and_keep_their_order(box, target):
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


def test_after_a_target_failure_later_jobs_are_left_to_the_relay(box, target):
    target.is_away = True
    with transaction.atomic():
        box.push([payload("notices-it")])
    target.is_away = False
    with transaction.atomic():
        box.push([payload("leaves-it-to-the-relay")])
    assert waiting() == ["notices-it", "leaves-it-to-the-relay"]
    OutboxRelay(box).run_once()
    assert stored() == ["notices-it", "leaves-it-to-the-relay"]


def test_a_crash_after_the_push_leaves_a_lease_and_no_duplicate(box, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(outbox.outbox, "settle", lambda **_: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit), transaction.atomic():
            box.push([payload("handed-on")])
    assert (stored(), waiting()) == (["handed-on"], ["handed-on"])
    OutboxRelay(box).run_once()
    assert waiting() == ["handed-on"], "the lease has not expired"
    OutboxEntry.objects.update(leased_until=timezone.now() - timedelta(seconds=1))
    OutboxRelay(box).run_once()
    assert (stored(), waiting()) == (["handed-on"], [])


def test_concurrent_relays_push_each_job_once_and_in_order(box, target):
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
        thread.join(60)
    assert target.pushed == [f"job-{number:05d}" for number in range(30)]
    assert waiting() == []


def test_a_refused_entry_keeps_its_error_and_does_not_block_others(box, target, caplog):
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


def test_jobs_wait_in_the_outbox_while_its_password_is_wrong(serve, caplog):  # noqa: F811
    host, port = serve(OrmBroker("other"), password="s3cret").address
    wrong, right = RemoteBroker(f"tcp://:no@{host}:{port}"), RemoteBroker(f"tcp://:s3cret@{host}:{port}")
    with transaction.atomic():
        Outbox(wrong, ["default"], own_alias=None).push([payload("innocent-job")])
    assert not OutboxRelay(Outbox(wrong, ["default"], own_alias=None)).run_once()
    assert [*OutboxEntry.objects.values_list("error", "leased_until")] == [("", None)]
    assert "Invalid password" in caplog.text
    assert OutboxRelay(Outbox(right, ["default"], own_alias=None)).run_once()
    assert (stored(), waiting()) == (["innocent-job"], [])
    for broker in (wrong, right):
        broker.close()


def test_a_job_whose_set_met_a_lock_at_the_server_is_not_refused(serve):  # noqa: F811
    class LocksOne(OrmBroker):
        is_locked = True

        def push(self, jobs):
            if self.is_locked:
                return [
                    BrokerUnavailable("database unavailable: another transaction holds a lock"),
                    *[None] * (len(jobs) - 1),
                ]
            return super().push(jobs)

    broker = LocksOne("other")
    host, port = serve(broker).address
    box = Outbox(RemoteBroker(f"tcp://{host}:{port}"), ["default"], own_alias=None)
    with transaction.atomic():
        box.push([payload("meets-a-lock"), payload("meets-none")])
    assert [*OutboxEntry.objects.values_list("jid", "error", "leased_until")] == [("job-meets-a-lock", "", None)]
    broker.is_locked = False
    assert OutboxRelay(box).run_once()
    assert waiting() == []
    box.target.close()


def test_an_entry_that_the_target_reports_as_not_unique_is_deleted(box, target, monkeypatch):
    monkeypatch.setattr(target, "push", lambda jobs: [NotUnique(job.jid) for job in jobs])
    with transaction.atomic():
        box.push([payload("second-of-its-kind")])
    assert waiting() == []


def test_the_relay_loop_pushes_entries_and_stops_on_request(box, target):
    target.is_away = True
    with transaction.atomic():
        box.push([payload("for-the-loop")])
    target.is_away = False
    loop = OutboxRelay(box)
    thread = threading.Thread(target=loop.run)
    thread.start()
    wait_until(lambda: stored() == ["for-the-loop"])
    loop.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_a_transaction_on_the_job_database_needs_no_outbox_entry():
    box = Outbox(OrmBroker("other"), ["default"], own_alias="other")
    with transaction.atomic(using="other"):
        box.push([payload("in-its-own-tx")])
        assert waiting() == []
        transaction.set_rollback(True, using="other")
    assert stored() == []


class TestSettings:
    def test_jobs_in_the_same_database_need_no_outbox(self):
        assert isinstance(get_producer(), OrmBroker)
        assert make_outbox_relay() is None

    def test_jobs_in_another_database_use_the_outbox_of_the_default_database(self):
        with override_settings(FAKTORY={"DATABASE": "other"}):
            with transaction.atomic():
                result = tasks.add.enqueue(1, 2)
                assert stored() == []
            assert stored() == [result.id]
            assert isinstance(make_outbox_relay(), OutboxRelay)

    @pytest.mark.parametrize("wait", [lambda sent: sent.wait(60), lambda sent: async_to_sync(sent.wait_async)(60)])
    def test_wait_refuses_a_transaction_whose_commit_sends_the_job(self, wait):
        with override_settings(FAKTORY={"DATABASE": "other"}):
            earlier = tasks.add.enqueue(1, 2)
            with transaction.atomic():
                sent = tasks.add.enqueue(3, 4)
                with pytest.raises(FaktoryError, match="wait: expected no open transaction of 'default'"):
                    wait(sent)
                with pytest.raises(ResultTimeout):
                    earlier.wait(0.03)
            Job.objects.using("other").filter(jid=sent.id).delete()
            with pytest.raises(TaskResultDoesNotExist):
                wait(sent)

    def test_wait_waits_for_a_job_that_is_still_in_the_outbox(self):
        with override_settings(FAKTORY={"DATABASE": "other"}):
            producer = get_producer()
            producer._paused_until = math.inf  # as after a failure of the target: the relay sends the job later
            with transaction.atomic():
                sent = tasks.add.enqueue(1, 2)
            assert waiting() == [sent.id]
            with pytest.raises(ResultTimeout):
                sent.wait(0.03)
            producer.relay("default")
            assert not waiting()
            with pytest.raises(ResultTimeout):
                sent.wait(0.03)

    def test_wait_reports_a_job_that_the_target_refused_as_missing(self):
        with override_settings(FAKTORY={"DATABASE": "other"}):
            get_producer()._paused_until = math.inf
            with transaction.atomic():
                sent = tasks.add.enqueue(1, 2)
            OutboxEntry.objects.update(error="refused")
            with pytest.raises(TaskResultDoesNotExist):
                sent.wait(60)

    def test_an_outbox_can_be_enabled_for_another_database(self):
        with override_settings(FAKTORY={"OUTBOX": ["other"]}):
            with transaction.atomic(using="other"):
                result = tasks.add.enqueue(1, 2)
                assert not Job.objects.exists()
            assert Job.objects.get().jid == result.id
            with transaction.atomic():
                tasks.add.enqueue(3, 4)
                transaction.set_rollback(True)
            assert Job.objects.count() == 1

    def test_the_outbox_can_be_disabled(self):
        with override_settings(FAKTORY={"DATABASE": "other", "OUTBOX": []}):
            assert isinstance(get_producer(), OrmBroker)

    def test_without_the_app_a_remote_broker_uses_no_outbox(self):
        with override_settings(INSTALLED_APPS=[], FAKTORY={"BROKER": "remote"}):
            assert isinstance(get_producer(), RemoteBroker)
