"""Test the password guard: it limits failed attempts per address, and its memory is bounded."""

import pytest

from django_faktory.server import login_throttle
from django_faktory.server.login_throttle import LoginThrottle, network_of

pytestmark = pytest.mark.core


def failing(times, *, limit=5, address="192.0.2.1", now=0.0):
    found = LoginThrottle(limit=limit)
    for _ in range(times):
        found.record_failure(address, now=now)
    return found


def test_who_failed_less_often_than_allowed_may_try():
    assert failing(4).wait_s("192.0.2.1", now=0.0) == 0.0


def test_who_failed_as_often_as_allowed_waits_for_the_time_of_one_try():
    assert failing(5).wait_s("192.0.2.1", now=0.0) == pytest.approx(12.0)
    assert failing(5).wait_s("192.0.2.1", now=12.0) == 0.0


def test_after_the_wait_one_failure_more_bars_again():
    found = failing(5)
    found.record_failure("192.0.2.1", now=12.0)
    assert found.wait_s("192.0.2.1", now=12.0) == pytest.approx(12.0)


def test_after_a_minute_without_a_failure_nothing_is_held_against_anybody():
    found = failing(5)
    for _ in range(4):
        found.record_failure("192.0.2.1", now=60.0)
    assert found.wait_s("192.0.2.1", now=60.0) == 0.0


def test_another_address_is_not_barred():
    assert failing(50).wait_s("192.0.2.2", now=0.0) == 0.0


def test_none_is_turned_away_where_any_number_is_allowed():
    assert failing(500, limit=0).wait_s("192.0.2.1", now=0.0) == 0.0


@pytest.mark.parametrize(
    ("one", "other", "are_one"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("", "", True),
    ],
)
def test_addresses_that_one_client_has_at_will_count_as_one(one, other, are_one):
    assert (network_of(one) == network_of(other)) is are_one


def test_a_flood_of_addresses_costs_bounded_memory_and_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr(login_throttle, "MAX_ADDRESSES", 3)
    found = LoginThrottle(limit=1)
    for number in range(10):
        found.record_failure(f"192.0.2.{number}", now=0.0)
    barred = [number for number in range(10) if found.wait_s(f"192.0.2.{number}", now=0.0)]
    assert barred == [7, 8, 9]
    assert len(found._levels) == 3
