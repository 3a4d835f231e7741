"""A server's hints: a thread sends them, one NOTIFY covers a burst, and the server itself ignores them."""

import pytest
from django.db import transaction

from django_faktory.store import notifier
from django_faktory.store.notifier import postgresql
from tests.bouncer import needs_session
from tests.store.notifier.conftest import needs_notifications
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    needs_notifications,
    needs_session("LISTEN needs a session; tests/bouncer covers poolers"),
]


@pytest.fixture
def start_publisher():
    started = []

    def start(**options):
        started.append(notifier.Publisher("default", **options))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def publisher(start_publisher):
    return start_publisher()


@pytest.fixture
def heard(client):
    """Return all payloads so far, as another client receives them."""
    found = []

    def payloads():
        found.extend(one.payload for one in client.notifies(timeout=0.05))
        return found

    return payloads


@pytest.fixture
def sent(monkeypatch):
    """Record the queues of each NOTIFY."""
    statements = []
    real = postgresql.notify

    def spy(on, queues, senders=None):
        statements.append(sorted(queues))
        real(on, queues, senders)

    monkeypatch.setattr(postgresql, "notify", spy)
    return statements


def test_announced_queues_are_received_by_another_client(publisher, heard):
    publisher.announce("default", {"a", "b"})
    wait_until(lambda: sorted(heard()) == ["a", "b"])


def test_a_burst_of_announcements_is_sent_complete_in_few_statements(publisher, heard, sent):
    names = {f"queue{number}" for number in range(40)}
    for name in sorted(names):
        publisher.announce("default", {name})
        publisher.announce("default", {"often"})
    wait_until(lambda: names | {"often"} <= set(heard()))
    assert len(sent) <= 10, "80 announcements within some milliseconds"


def test_only_its_present_connection_counts_as_its_own(start_publisher, heard):
    """PostgreSQL may give the pid of an earlier one to another client."""
    publisher = start_publisher(reconnect_every_s=0.0)
    for number in range(3):
        publisher.announce("default", {f"queue{number}"})
        wait_until(lambda number=number: f"queue{number}" in heard())
    assert len(publisher._senders) == 1


def test_an_announcement_inside_a_transaction_is_not_sent(publisher, heard):
    with transaction.atomic():
        publisher.announce("default", {"too-early"})
    publisher.announce("default", {"later"})
    wait_until(lambda: "later" in heard())
    assert heard() == ["later"]


def test_pending_announcements_are_sent_on_stop(heard):
    publisher = notifier.Publisher("default")
    publisher.announce("default", {"a"})
    publisher.announce("default", {"b"})
    publisher.stop()
    assert sorted(heard()) == ["a", "b"]


def test_a_listener_ignores_announcements_of_its_own_server(publisher, closing_later):
    listener = closing_later(notifier.listen("default", is_own=publisher.is_own))
    publisher.announce("default", {"own"})
    wait_until(lambda: publisher._senders)
    while listener.wait(0.5):
        pass  # its first look, and its test notification
    publisher.announce("default", {"own"})
    assert listener.wait(0.2) is False
    notifier.announce("default", {"others"})
    assert listener.wait(30) is True
