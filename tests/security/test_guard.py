"""Test the password guard: it limits failed attempts per address, and its memory is bounded."""

import pytest

from django_faktory.server.login_throttle import LoginThrottle, network_of

pytestmark = pytest.mark.core


def failing(times, *, limit=5, address="192.0.2.1", now=0.0):
    found = LoginThrottle(limit=limit)
    for _ in range(times):
        found.record_failure(address, now=now)
    return found


def test_an_address_with_fewer_failures_than_the_limit_may_try():
    assert failing(4).wait_s("192.0.2.1", now=0.0) == 0.0


def test_an_address_that_reaches_the_limit_waits_for_one_try():
    assert failing(5).wait_s("192.0.2.1", now=0.0) == pytest.approx(12.0)
    assert failing(5).wait_s("192.0.2.1", now=12.0) == 0.0


def test_one_more_failure_after_the_wait_blocks_the_address_again():
    found = failing(5)
    found.record_failure("192.0.2.1", now=12.0)
    assert found.wait_s("192.0.2.1", now=12.0) == pytest.approx(12.0)


def test_failures_expire_after_a_minute_without_a_failure():
    found = failing(5)
    for _ in range(4):
        found.record_failure("192.0.2.1", now=60.0)
    assert found.wait_s("192.0.2.1", now=60.0) == 0.0


def test_another_address_is_not_blocked():
    assert failing(50).wait_s("192.0.2.2", now=0.0) == 0.0


def test_a_limit_of_zero_blocks_no_address():
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
def test_addresses_of_one_ipv6_network_count_as_one(one, other, are_one):
    assert (network_of(one) == network_of(other)) is are_one


def test_memory_is_bounded_and_the_oldest_addresses_are_dropped():
    found = LoginThrottle(limit=1, max_addresses=3)
    for number in range(10):
        found.record_failure(f"192.0.2.{number}", now=0.0)
    barred = [number for number in range(10) if found.wait_s(f"192.0.2.{number}", now=0.0)]
    assert barred == [7, 8, 9]
    assert len(found._levels) == 3
