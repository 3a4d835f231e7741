"""Job options in `custom`: which are accepted or refused, and which jobs count as duplicates. Rule: W27."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from django_faktory.core.job_options import JobOptions, unique_key
from django_faktory.core.job_parser import parse_job
from django_faktory.errors import InvalidPayload

pytestmark = pytest.mark.core

T0 = datetime(2026, 5, 1, 12, tzinfo=UTC)


def parsed(custom, **fields):
    raw = custom if isinstance(custom, str) else json.dumps(custom)
    job = {"jid": "job-0001", "jobtype": "t", "args": [1]} | fields
    return parse_job(f'{json.dumps(job)[:-1]},"custom":{raw}}}')


def key(**fields):
    return parsed({"unique_for": 1}, **fields).options.unique_key


@pytest.mark.parametrize(
    "custom", ["null", "{}", '{"_bid":"b-1"}', '{"bid":""}', '{"unique_for":null}', '{"unique_until":"x"}']
)
def test_an_ordinary_job_has_no_options(custom):
    assert parsed(custom).options is None


@pytest.mark.parametrize(("raw", "seconds"), [("60", 60), ("0.5", 0.5), ("1e2", 100), ("1e400", 100 * 365 * 86_400)])
def test_durations_above_zero_are_accepted_and_capped_at_a_century(raw, seconds):
    options = parsed(f'{{"unique_for":{raw},"expires_in":{raw}}}').options
    assert (options.unique_for, options.expires_in) == (seconds, seconds)


@pytest.mark.parametrize("field", ["unique_for", "expires_in"])
@pytest.mark.parametrize("raw", ["0", "0.0", "-1", "true", '"60"', "[60]", "{}", "1e-400"])
def test_an_invalid_duration_is_refused_with_its_field_and_value(field, raw):
    with pytest.raises(InvalidPayload) as caught:
        parsed(f'{{"{field}":{raw}}}')
    shown = raw if len(raw) < 60 else "…"
    assert str(caught.value) == f"custom.{field}: expected a number of seconds above 0, got {shown}"
    assert caught.value.jid == "job-0001"


@pytest.mark.parametrize(("until", "is_start"), [("success", False), ("start", True), (None, False)])
def test_unique_until_is_success_unless_start_is_given(until, is_start):
    assert parsed({"unique_for": 60, "unique_until": until}).options.unique_until_start is is_start


@pytest.mark.parametrize("until", ["end", "", 5, ["start"]])
def test_an_unknown_unique_until_value_is_refused(until):
    with pytest.raises(InvalidPayload, match=r'^custom\.unique_until: expected "success" or "start", got '):
        parsed({"unique_for": 60, "unique_until": until})


def test_the_last_value_of_a_duplicate_option_counts():
    """W7: a duplicate key is refused only at the top level of a job."""
    beside = '"x":{"\\ud800":1e400}'
    assert parsed(f'{{"expires_in":1,{beside},"expires_in":2}}').options.expires_in == 2
    with pytest.raises(InvalidPayload, match=r"custom\.expires_in: "):
        parsed(f'{{"expires_in":1,{beside},"expires_in":0}}')


@pytest.mark.parametrize("value", ["tomorrow", "", 5, "2026-05-01"])
def test_an_expires_at_that_is_not_a_timestamp_is_refused(value):
    with pytest.raises(InvalidPayload, match=r"^invalid timestamp for 'custom\.expires_at': "):
        parsed({"expires_at": value})


def test_expires_at_is_parsed_with_its_utc_offset():
    assert parsed({"expires_at": "2026-05-01T14:00:00+02:00"}).options == JobOptions(expires_at=T0)


def test_options_without_expiry_or_unique_key_set_no_deadline():
    assert JobOptions().expiry(T0) is None
    assert JobOptions(unique_for=60).unique_ends(T0) is None


def test_deadlines_count_from_the_given_time_and_are_capped_at_year_9999():
    options = JobOptions(unique_key="k", unique_for=60, expires_in=90)
    assert (options.unique_ends(T0), options.expiry(T0)) == (T0 + timedelta(seconds=60), T0 + timedelta(seconds=90))
    late = datetime(9999, 12, 30, 23, 59, 59, tzinfo=UTC)
    assert options.unique_ends(late + timedelta(days=1)) == datetime(9999, 12, 31, tzinfo=UTC)


@pytest.mark.parametrize("track", ["1", "true", '"yes"', "{}"])
def test_a_tracked_job_keeps_its_result_for_at_least_1800_seconds(track):
    assert parsed(f'{{"track":{track}}}').result_ttl == 1800
    assert parsed(f'{{"track":{track},"result_ttl":60}}').result_ttl == 1800
    assert parsed(f'{{"track":{track},"result_ttl":3600}}').result_ttl == 3600


@pytest.mark.parametrize("track", ["0", "false", "null", '""'])
def test_a_false_track_option_sets_no_result_ttl(track):
    assert parsed(f'{{"track":{track}}}').result_ttl is None


# --- which jobs are duplicates


def test_the_unique_key_depends_on_jobtype_queue_and_arguments():
    keys = [key(), key(jobtype="u"), key(queue="q"), key(args=[2]), key(args=[1, 1]), key(args=["1"]), key(args=[[1]])]
    assert len(set(keys)) == len(keys)
    assert all(len(one) == 64 and int(one, 16) for one in keys)


def test_the_unique_key_ignores_all_other_fields():
    assert key() == key(jid="job-0002", priority=9, retry=1, at="2099-01-01T00:00:00Z", queue="default")


def test_keyword_arguments_change_the_unique_key():
    with_a, with_b, without = ({"unique_for": 1, "kwargs": kwargs} for kwargs in ({"a": 1}, {"b": 1}, {}))
    keys = [parsed(custom).options.unique_key for custom in (with_a, with_b, without)]
    assert len(set(keys)) == 3
    assert keys[2] == key()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("[1,2]", " [ 1 ,\t2\n] "),
        ('["a b"]', '[ "a b" ]'),
        ('["é😀"]', '["\\u00e9\\ud83d\\ude00"]'),
        ('["/"]', '["\\/"]'),
        ('[{"a":1,"b":[null]}]', '[{"b": [ null ], "a": 1}]'),
        ('["\\ud800"]', '[ "\\uD800"]'),
    ],
)
def test_equal_arguments_have_one_unique_key_in_any_json_spelling(one, other):
    assert unique_key("t", "q", one) == unique_key("t", "q", other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("[1]", "[1.0]"),
        ("[9007199254740993]", "[9007199254740992]"),
        ("[1e400]", "[2e400]"),
        ('["a b"]', '["a  b"]'),
        ("[1]", '["1"]'),
        ("[true]", '["true"]'),
        ("[null]", "[]"),
        ('[["a"]]', '["[\\"a\\"]"]'),
    ],
)
def test_different_arguments_have_different_unique_keys(one, other):
    assert unique_key("t", "q", one) != unique_key("t", "q", other)


def test_jobtype_and_queue_cannot_be_confused_in_the_unique_key():
    assert unique_key('t","q', "r", "[]") != unique_key("t", 'q","r', "[]")
