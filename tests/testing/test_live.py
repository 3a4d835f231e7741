"""Test a server and a worker next to the test: other clients and threads do the work."""

import json

import pytest
from django.db import connection, transaction
from django.test import TransactionTestCase, override_settings

from django_faktory import FaktoryError
from django_faktory.brokers import remote_broker
from django_faktory.core.payloads import FetchRequest
from django_faktory.models import Job
from django_faktory.tasks.compat import TaskResultStatus
from django_faktory.testing import LiveFaktory, LiveFaktoryMixin
from tests.factories import payload
from tests.project import tasks
from tests.project.models import Mark

pytestmark = pytest.mark.once_if_quick


def test_the_live_worker_runs_committed_jobs(live_faktory):
    with transaction.atomic():
        result = tasks.writes_mark.enqueue("live")
    failing = tasks.fails_for_good.enqueue()
    live_faktory.wait(result, failing)
    assert (result.status, failing.status) == (TaskResultStatus.SUCCESSFUL, TaskResultStatus.FAILED)
    assert Mark.objects.get().text == "live"


def test_a_client_can_push_to_the_live_server(live_faktory):
    client = remote_broker(live_faktory.url)
    try:
        assert client.push([payload(jobtype=tasks.writes_mark.jobtype, args=["pushed"])]) == [None]
    finally:
        client.close()
    live_faktory.wait()
    assert Mark.objects.get().text == "pushed"


def test_without_a_worker_other_clients_can_fetch(transactional_db):
    result = tasks.add.enqueue(1, 2)
    with LiveFaktory(concurrency=0) as live:
        client = remote_broker(live.url)
        try:
            [[job]] = client.fetch([FetchRequest(queues=("default",))])
        finally:
            client.close()
        assert json.loads(job.text)["args"] == [1, 2]
        with pytest.raises(TimeoutError, match=f"{tasks.add.jobtype} {result.id} is working"):
            live.wait(timeout_s=0.05)
        with pytest.raises(TimeoutError, match="is RUNNING"):
            live.wait(result, timeout_s=0.05)
    live.stop()


@pytest.mark.django_db
def test_live_faktory_does_not_start_inside_a_transaction():
    with pytest.raises(FaktoryError, match="TransactionTestCase"), LiveFaktory():
        pass


def test_live_faktory_does_not_start_with_a_remote_broker():
    with override_settings(FAKTORY={"BROKER": "remote"}), pytest.raises(FaktoryError, match="BROKER"):
        LiveFaktory()


@pytest.mark.skipif(connection.vendor != "sqlite", reason="only SQLite has databases in memory")
@pytest.mark.django_db(transaction=True)
def test_live_faktory_does_not_start_with_in_memory_sqlite(monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "NAME", "file:memorydb_default?mode=memory&cache=shared")
    with pytest.raises(FaktoryError, match="in memory is none"), LiveFaktory():
        pass


class WithMixin(LiveFaktoryMixin, TransactionTestCase):
    def test_the_mixin_provides_live_faktory_to_unittest(self):
        result = tasks.add.enqueue(1, 2)
        self.live_faktory.wait(result)
        assert result.return_value == 3
        assert not Job.objects.exclude(state="succeeded").exists()


def test_live_faktory_stops_after_an_exception_in_its_block(transactional_db):
    live = LiveFaktory()
    with pytest.raises(ZeroDivisionError), live:
        _ = 1 / 0
    with pytest.raises(FaktoryError):
        remote_broker(live.url).push([payload()])
