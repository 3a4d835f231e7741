"""A database call ends after the deadline if the database does not respond."""

import time

import pytest
from django.db import connection

from django_faktory.errors import BrokerUnavailable
from django_faktory.runtime import db_watchdog
from django_faktory.store import transactions
from django_faktory.store.transactions import run

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def limits(monkeypatch):
    """Return a function that sets a deadline for this process until the test ends; connection options are restored."""
    monkeypatch.setattr(transactions, "limit_attempt", transactions.limit_attempt)
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", dict(connection.settings_dict["OPTIONS"]))
    if connection.vendor != "postgresql":
        pytest.skip("other drivers have timeouts of their own")
    yield lambda within_s: db_watchdog.enforce("default", within_s, check_every_s=0.05)
    connection.close()
    with connection.cursor() as cursor:  # no client waits for it, but while it runs no dead row here can be vacuumed
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND state = 'active' AND query LIKE 'SELECT pg_sleep(%'"
        )


def sleep(seconds):
    def verb(at):
        with at.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(%s)", [seconds])
        return "done"

    return verb


@pytest.mark.parametrize("atomic", [True, False])
def test_a_call_past_the_deadline_fails_and_the_next_call_reconnects(limits, atomic):
    limits(0.2)
    began_at = time.monotonic()
    with pytest.raises(BrokerUnavailable):
        run("default", sleep(60), atomic=atomic)
    assert time.monotonic() - began_at < 50
    assert run("default", sleep(0), atomic=atomic) == "done"


def test_calls_within_the_deadline_are_not_interrupted(limits):
    limits(30)
    assert [run("default", sleep(0.06)) for _ in range(5)] == ["done"] * 5


class Clock:
    """Stand-in for the `time` module: each sleep takes the next of the given durations."""

    def __init__(self, *durations):
        self.now, self.durations = 1000.0, list(durations)

    def monotonic(self):
        return self.now

    def sleep(self, _):
        self.now += self.durations.pop(0)
        if not self.durations:
            transactions.limit_attempt = None  # ends the watch


@pytest.mark.parametrize(("durations", "is_cut"), [([1, 60, 1, 1], False), ([1] * 12, True)])
def test_time_while_the_process_is_suspended_is_not_counted(monkeypatch, durations, is_cut):
    cuts = []
    monkeypatch.setattr(db_watchdog, "_cut", cuts.append)
    monkeypatch.setattr(db_watchdog, "time", Clock(*durations))
    watch = db_watchdog._Watchdog(10)
    monkeypatch.setattr(transactions, "limit_attempt", watch.limit)
    with watch.limit(connection):
        watch._run()
    assert bool(cuts) == is_cut


def test_a_thread_can_have_a_longer_deadline(limits, monkeypatch):
    limits(0.1)
    monkeypatch.setattr(db_watchdog._thread_limits, "timeout_s", 60, raising=False)
    assert run("default", sleep(0.5)) == "done"


@pytest.mark.parametrize(("vendor", "wanted"), [
    ("postgresql", {"connect_timeout": 5, "tcp_user_timeout": 30_000}), ("mysql", {"read_timeout": 60}),
])  # fmt: skip
def test_driver_timeouts_are_set_unless_the_project_sets_them(monkeypatch, vendor, wanted):
    if connection.vendor != vendor:
        pytest.skip("of another driver")
    monkeypatch.setattr(transactions, "limit_attempt", transactions.limit_attempt)
    options = {**connection.settings_dict["OPTIONS"], "connect_timeout": 2}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    db_watchdog.enforce("default", 30)
    assert options["connect_timeout"] == 2
    options.pop("connect_timeout")
    db_watchdog.enforce("default", 30)
    assert wanted.items() <= options.items()
    connection.close()
    assert run("default", lambda _: "done") == "done", "the driver knows these options"
