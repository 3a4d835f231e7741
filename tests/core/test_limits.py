"""The arithmetic of limits: how they are parsed, and which jobs a limiter admits."""

from datetime import timedelta
from random import Random

import pytest

from django_faktory.core.limits import (
    FORGIVEN_S,
    Allowance,
    InvalidLimit,
    LimiterState,
    Scope,
    allocate_permits,
    family_of,
    format_permits,
    parse_permits,
    rate_text,
)
from tests.factories import T0

pytestmark = pytest.mark.core


def limiter(value, number=1, **fields):
    return LimiterState(id=number, allows=Allowance.of(value), filled_at=T0, **fields)


def after(seconds):
    return T0 + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        (5, Allowance(concurrency=5)),
        ("100/s", Allowance(rate=100, per=1)),
        ("10 / minute", Allowance(rate=10, per=60)),
        ("3/30s", Allowance(rate=3, per=30)),
        ("7/2d", Allowance(rate=7, per=172_800)),
        ({"concurrency": 2, "rate": "1/h", "burst": 4}, Allowance(concurrency=2, rate=1, per=3600, burst=4)),
    ],
)
def test_every_form_of_limit_is_parsed(value, allowed):
    assert Allowance.of(value) == allowed


@pytest.mark.parametrize(
    "value",
    [0, -1, True, 1.5, None, [], "", "5", "5/", "0/s", "-1/s", "5/x", "5/0s", "1/400d", "9999999999/s", {}, {"rate": 5},
     {"concurrency": "x"}, {"burst": 3, "concurrency": 1}, {"rate": "5/s", "burst": 0}, {"speed": 1}],
)  # fmt: skip
def test_an_invalid_limit_is_refused_with_the_expected_form(value):
    with pytest.raises(InvalidLimit, match=r"expected|no such key"):
        Allowance.of(value)


@pytest.mark.parametrize("text", ["100/s", "10/m", "5/30s", "1/h", "2/7d"])
def test_a_rate_is_formatted_as_it_was_written(text):
    allowed = Allowance.of(text)
    assert rate_text(allowed.rate, allowed.per) == text == str(allowed)


def test_concurrency_permits_are_counted():
    one = limiter(2)
    refusals = allocate_permits([[one], [one], [one]], T0)
    assert refusals == [None, None, one]
    assert (one.in_use, one.opens_at) == (2, None)


def test_no_permit_is_acquired_if_one_limiter_refuses():
    wide, narrow = limiter(5), limiter(1, 2, in_use=1)
    assert allocate_permits([[wide, narrow]], T0) == [narrow]
    assert wide.in_use == 0


def test_a_task_limiter_is_reported_before_a_queue_limiter():
    queue, task = limiter(1, 1, scope=Scope.QUEUE, in_use=1), limiter(1, 2, in_use=1)
    assert allocate_permits([[queue, task], [queue]], T0) == [task, queue]


def test_a_paused_limiter_admits_no_job():
    one = limiter(5, is_paused=True)
    assert allocate_permits([[one]], T0) == [one]
    assert one.opens_at is None


def test_tokens_accrue_over_time_up_to_the_bucket_capacity():
    one = limiter("100/s", tokens=0.0)
    one.fill(after(0.1))
    assert one.room == 10
    one.fill(after(1000))
    assert one.room == 40


def test_burst_sets_how_many_jobs_can_start_at_once():
    one = limiter({"rate": "10/m", "burst": 10}, tokens=0.0)
    one.fill(after(1000))
    assert one.room == 10


def test_a_slow_rate_admits_one_job_at_a_time():
    one = limiter("10/m", tokens=1.0)
    assert allocate_permits([[one], [one]], T0) == [None, one]
    assert one.opens_at == after(6)


def test_a_rate_limiter_without_tokens_opens_again_after_100_ms():
    one = limiter("100/s", tokens=0.0)
    assert allocate_permits([[one]], T0) == [one]
    assert one.opens_at == after(0.1)


def test_new_jobs_do_not_overtake_jobs_waiting_for_tokens():
    one = limiter("100/s", tokens=0.0)
    allocate_permits([[one]], T0)
    assert allocate_permits([[one]], after(0.09)) == [one]
    assert allocate_permits([[one]], after(0.11)) == [one], "the new token belongs to a waiting job"
    one.fill(after(0.1))
    assert one.room == 10


def test_a_late_refill_adds_tokens_for_the_delay():
    one = limiter("100/s", tokens=0.0, opens_at=after(0.1))
    one.fill(after(1.1))
    assert one.room == 110


def test_a_rate_limiter_issues_no_permit_to_release():
    rate, places = limiter("5/s", 3), limiter(5, 7)
    assert format_permits([rate]) is None
    assert format_permits([rate, places]) == ",7,"
    assert parse_permits(",7,12,") == [7, 12]
    assert parse_permits("") == parse_permits(None) == []


def test_the_family_of_a_limit_key_is_the_part_before_its_colon():
    assert [family_of("customer:42:x"), family_of("stripe")] == ["customer", "stripe"]


@pytest.mark.parametrize(("text", "seed"), [(text, seed) for text in ("20/s", "100/s", "10/m") for seed in range(5)])
def test_starts_in_any_window_stay_within_the_documented_rate_bound(text, seed):
    """docs/limits.md: at most the rate, the saved tokens, and 2 s of the rate after a late set."""
    chance = Random(seed)
    allows = Allowance.of(text)
    one = limiter(text, tokens=allows.capacity)
    now, starts = 0.0, []
    while now < 60 / allows.per_second:
        now += chance.choice([0.01, 0.05, 0.1, 0.3, 1.0, 3.0]) / min(1.0, allows.per_second)
        one.fill(after(now))
        taken = one.room
        for _ in range(taken):
            one.take()
        starts += [now] * taken
        one.wait_for_next(after(now), has_released=taken > 0)
    for width in (0.1, 1.0, 10.0):
        most = max(sum(start <= moment < start + width for moment in starts) for start in starts)
        assert most <= allows.per_second * (width + FORGIVEN_S) + allows.capacity + 1e-6
    assert len(starts) <= allows.per_second * now + allows.capacity + 1e-6, "no job starts without a token"
