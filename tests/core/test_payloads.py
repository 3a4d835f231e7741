"""Jobs and failure reports between components: what PUSH checks, what is stored verbatim, and what is cut."""

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_faktory.core import payloads
from django_faktory.core.job_parser import parse_job
from django_faktory.core.payloads import JobPayload, Reservation
from django_faktory.errors import InvalidPayload

pytestmark = pytest.mark.core

JOB = {"jid": "12345678", "jobtype": "mail", "args": []}
T0 = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


def text_of(**fields):
    return json.dumps(JOB | fields, separators=(",", ":"))


def job_of(**fields):
    return parse_job(text_of(**fields))


def held(text, **fields):
    return Reservation(**({"jid": "12345678", "queue": "default", "text": text, "wid": "w", "attempt": 1} | fields))


# --- what PUSH checks: W9 ---


def test_omitted_fields_get_the_protocol_defaults():
    assert job_of() == JobPayload(
        jid="12345678",
        jobtype="mail",
        queue="default",
        priority=0,
        retry=25,
        reserve_for=1800,
        backtrace=0,
        at=None,
        result_ttl=None,
        text='{"jid":"12345678","jobtype":"mail","args":[],"queue":"default","retry":25}',
    )


def test_null_fields_count_as_omitted():
    names = ("queue", "priority", "retry", "reserve_for", "backtrace", "at", "created_at", "custom")
    job, plain = job_of(**dict.fromkeys(names)), job_of()
    for attribute in ("queue", "priority", "retry", "reserve_for", "backtrace", "at", "result_ttl"):
        assert getattr(job, attribute) == getattr(plain, attribute)
    assert json.loads(job.text) == JOB | dict.fromkeys(names) | {"queue": "default", "retry": 25}


@pytest.mark.parametrize(
    ("fields", "attribute", "value"),
    [
        ({"jid": "é" * 255}, "jid", "é" * 255),
        ({"queue": ""}, "queue", "default"),
        ({"queue": "A-z._9"}, "queue", "A-z._9"),
        ({"priority": 1}, "priority", -100),
        ({"priority": 9}, "priority", 100),
        ({"retry": -7}, "retry", -1),
        ({"retry": 10**30}, "retry", 2**31 - 1),
        ({"reserve_for": 86_400}, "reserve_for", 86_400),
        ({"reserve_for": 59}, "reserve_for", 60),
        ({"backtrace": 10**9}, "backtrace", 200),
        ({"backtrace": -5}, "backtrace", -1),
        ({"at": ""}, "at", None),
        ({"at": "2026-05-01T12:00:00Z"}, "at", T0),
        ({"custom": {"result_ttl": 60}}, "result_ttl", 60),
        ({"custom": {"result_ttl": None}}, "result_ttl", None),
    ],
)
def test_valid_field_values_are_accepted_or_clamped(fields, attribute, value):
    """W9: some values are replaced by a default or clamped to a range."""
    assert getattr(job_of(**fields), attribute) == value


@pytest.mark.parametrize(
    ("fields", "start", "names"),
    [
        ({"jid": "1234567"}, "jobs must have a reasonable jid parameter", "8 to 255"),
        ({"jid": "j" * 256}, "jobs must have a reasonable jid parameter", "8 to 255"),
        ({"jid": 12345678}, "jobs must have a reasonable jid parameter", "got 12345678"),
        ({"jid": None}, "jobs must have a reasonable jid parameter", "null or nothing"),
        ({"jid": "1234567\x00"}, "jobs must have a reasonable jid parameter", "without NUL"),
        ({"jid": "1234567\ud800"}, "jobs must have a reasonable jid parameter", "jid"),
        ({"jobtype": ""}, "jobs must have a jobtype parameter", "1 to 255"),
        ({"jobtype": "t" * 256}, "jobs must have a jobtype parameter", "1 to 255"),
        ({"jobtype": "t\x00"}, "jobs must have a jobtype parameter", "without NUL"),
        ({"jobtype": "\udfff"}, "jobs must have a jobtype parameter", "jobtype"),
        ({"args": None}, "jobs must have an args parameter", "array"),
        ({"args": {}}, "jobs must have an args parameter", "array"),
        ({"reserve_for": 86_401}, "jobs cannot be reserved for more than one day", "86400"),
        ({"reserve_for": 60.5}, "reserve_for: expected an integer", "60.5"),
        ({"at": 5}, "invalid timestamp for 'at'", "RFC 3339"),
        ({"at": "tomorrow"}, "invalid timestamp for 'at'", "tomorrow"),
        ({"at": "2026-05-01 12:00:00Z"}, "invalid timestamp for 'at'", "RFC 3339"),
        ({"at": "2026-05-01T12:00:00"}, "invalid timestamp for 'at'", "RFC 3339"),
        ({"at": "2026-02-30T12:00:00Z"}, "invalid timestamp for 'at'", "RFC 3339"),
        ({"at": "9999-12-31T23:59:59-23:59"}, "invalid timestamp for 'at'", "RFC 3339"),
        ({"created_at": "now"}, "invalid timestamp for 'created_at'", "RFC 3339"),
        ({"queue": "bad queue"}, 'cannot get "bad queue" queue', r"\A[a-zA-Z0-9._-]+\z"),
        ({"queue": "q" * 256}, "cannot get ", "255"),
        ({"queue": "q\n"}, "cannot get ", "queue names must match"),
        ({"queue": 7}, "queue: expected a string", "7"),
        ({"priority": 0}, "priority: expected an integer from 1 to 9", "0"),
        ({"priority": 5.0}, "priority: expected an integer from 1 to 9", "5.0"),
        ({"retry": "5"}, "retry: expected an integer", "5"),
        ({"retry": True}, "retry: expected an integer", "true"),
        ({"backtrace": "all"}, "backtrace: expected an integer", "all"),
        ({"custom": []}, "custom: expected an object or null", "[]"),
        ({"custom": {"result_ttl": -1}}, "custom.result_ttl: expected an integer", "-1"),
        ({"custom": {"result_ttl": 2**31}}, "custom.result_ttl: expected an integer", str(2**31)),
    ],
)
def test_invalid_field_values_are_refused_in_one_line_that_names_the_field(fields, start, names):
    """W9: the message begins like the original server's, if that has one."""
    with pytest.raises(InvalidPayload) as caught:
        job_of(**fields)
    message = str(caught.value)
    assert message.startswith(start)
    assert names in message
    assert message.isprintable()
    assert len(message) < 300


def test_a_job_far_in_the_future_is_checked_like_any_other():
    """W9: the original accepts such a job and discards it when it falls due."""
    with pytest.raises(InvalidPayload, match="queue names must match"):
        job_of(at="2999-01-01T00:00:00Z", queue="no such name")


@pytest.mark.parametrize(
    ("text", "jid"),
    [
        (text_of(jobtype=""), "12345678"),
        (text_of(jid="short"), "short"),
        (text_of(jid=""), ""),
        (text_of(jid="\ud800"), ""),
        ("nonsense", ""),
    ],
)
def test_a_refusal_carries_the_jid_if_the_job_has_one(text, jid):
    """W12: the jid of the refused job is reported if it is known."""
    with pytest.raises(InvalidPayload) as caught:
        parse_job(text)
    assert caught.value.jid == jid


def test_duplicate_keys_are_refused_at_the_top_level_and_kept_below_it():
    """W7: a duplicate key is an error only at the top level of a job."""
    with pytest.raises(InvalidPayload, match="given twice"):
        parse_job('{"jid":"12345678","jobtype":"t","args":[],"jid":"87654321"}')
    text = (
        '{"jid":"12345678","jobtype":"t","queue":"q","retry":1,"args":[{"a":1,"a":2}],'
        '"custom":{"result_ttl":1,"result_ttl":2}}'
    )
    job = parse_job(text)
    assert job.text == text
    assert job.result_ttl == 2


# --- what is stored: W11 ---

VERBATIM = [
    '{"zz":1.0,"jid":"12345678","args":[9007199254740993,1.0,1e400,"\\u0000","<&>"],"jobtype":"t","queue":"q","retry":1}',
    '{ "jid" : "12345678" ,\t"jobtype":"t","args":[ ],"queue":"q","retry" : 25,"custom":{"b":2, "a":1.0} }',
    '{"jid":"12345678","jobtype":"t","args":[],"queue":"q","retry":-3,"created_at":"2020-01-01T00:00:00.123456789+02:00"}',
    '{"j\\u0069d":"12345678","jobtype":"t","args":["\\ud800"],"queue":"q","retry":1,"priority":9,"at":""}',
]


@pytest.mark.parametrize("text", VERBATIM)
def test_a_complete_job_is_stored_verbatim(text):
    """W11: only the surrounding white space is removed."""
    assert parse_job(text).text == text
    assert parse_job(f" {text}\t").text == text


def test_missing_queue_and_retry_are_added_at_the_end():
    assert parse_job('{"jid":"12345678","jobtype":"t","args":[1.0] }').text == (
        '{"jid":"12345678","jobtype":"t","args":[1.0],"queue":"default","retry":25}'
    )


@pytest.mark.parametrize("field", ["enqueued_at", "failure"])
def test_server_only_fields_sent_by_a_client_are_dropped(field):
    """W11: only the server sets these fields."""
    assert field not in json.loads(job_of(**{field: {"retry_count": 9}}).text)


def test_empty_members_are_replaced_by_defaults():
    job = job_of(queue="", retry=None, created_at="")
    assert job.text == '{"jid":"12345678","jobtype":"mail","args":[],"queue":"default","retry":25}'


@given(
    st.lists(
        st.one_of(st.integers(), st.text(), st.none(), st.floats(allow_nan=False, allow_infinity=False)), max_size=5
    ),
    st.dictionaries(st.text(min_size=1).filter(lambda key: key not in {"enqueued_at", "failure"}), st.text()),
)
def test_a_stored_job_keeps_every_member_in_order(args, others):
    """W11: unknown members included, in their order."""
    sent = others | JOB | {"args": args, "queue": "q", "retry": 3}
    for name in ("at", "created_at", "custom", "priority", "reserve_for", "backtrace"):
        sent.pop(name, None)
    job = parse_job(json.dumps(sent))
    assert list(json.loads(job.text).items()) == list(sent.items())


# --- what FETCH gives ---


def test_a_fetched_job_is_the_stored_text_followed_by_server_fields():
    text = '{"jid":"12345678","jobtype":"t","args":[1.0]}'
    failed = '{"retry_count":0}'
    got = held(text, created_at=T0, enqueued_at=T0 + timedelta(milliseconds=1500), failure=failed).wire()
    assert got == (
        text[:-1] + ',"created_at":"2026-05-01T12:00:00Z","enqueued_at":"2026-05-01T12:00:01.5Z","failure":'
        '{"retry_count":0}}'
    )
    assert held(text).wire() == text


@pytest.mark.parametrize(
    ("text", "is_added"),
    [
        ('{"created_at":"2020-01-01T00:00:00Z","args":[]}', False),
        ('{"args":["\\"created_at\\"","created_at"]}', True),
        ('{"args":[{"created_at":1}],"created_at":"2020-01-01T00:00:00Z"}', False),
        ('{"args":[{"created_at":1,"b":2}],"custom":{}}', True),
        ('{"args":[1],"created_at":"2020-01-01T00:00:00Z","custom":{"a":[1]}}', False),
        ('{ "args" : [] , "created_at" : "2020-01-01T00:00:00Z" }', False),
        ('{"args":[","],"custom":",\\"created_at\\":1"}', True),
        ('{"custom":"created_at","args":[]}', True),
    ],
)
def test_a_clients_own_created_at_is_kept(text, is_added):
    """W11: the server adds its own only if the client sent none."""
    wire = held(text, created_at=T0).wire()
    assert wire.startswith(text[:-1])
    assert (json.loads(wire)["created_at"] == "2026-05-01T12:00:00Z") is is_added


# --- jobs of our own ---


def test_a_new_job_equals_its_parsed_text():
    job = payloads.new_job(
        jid="12345678",
        jobtype="mail.send",
        args=[1, "é", None, {"a": [1.5]}],
        kwargs={"to": "x"},
        queue="mail",
        priority=50,
        retry=4,
        reserve_for=60,
        backtrace=3,
        at=T0,
        created_at="2026-05-01T12:00:00Z",
        result_ttl=60,
        custom={"track": 1},
    )
    assert parse_job(job.text) == job
    assert json.loads(job.text)["created_at"] == "2026-05-01T12:00:00Z"
    assert json.loads(job.text)["custom"] == {"track": 1, "kwargs": {"to": "x"}, "result_ttl": 60}


def test_a_plain_new_job_has_only_the_minimal_fields():
    job = payloads.new_job(jid="12345678", jobtype="t", args=[])
    assert job.text == '{"jid":"12345678","jobtype":"t","queue":"default","args":[],"retry":25}'
    assert parse_job(job.text) == job


# --- reports of failure: W17 ---


def test_failure_texts_are_truncated_to_byte_limits():
    """W17: the limits are in bytes; texts are cut at a character boundary."""
    report = payloads.failure(jid="12345678", errtype="é" * 80, message="😀" * 300, backtrace=["é" * 600] * 250)
    assert report.errtype == "é" * 50
    assert report.message == "😀" * 250
    assert report.backtrace == ("é" * 500,) * 200


def test_a_failure_report_without_details_is_recorded_as_unknown():
    report = payloads.failure(jid="12345678")
    assert (report.errtype, report.message, report.backtrace) == ("unknown", "unknown", ())


@pytest.mark.parametrize(
    ("text", "size", "shorter"),
    [
        ("abcd", 3, "abc"),
        ("aé", 2, "a"),
        ("é", 2, "é"),
        ("😀", 3, ""),
        ("a\ud800b", 9, "a?b"),
    ],
)
def test_texts_are_truncated_at_character_boundaries(text, size, shorter):
    assert payloads.cut(text, size) == shorter


@given(st.text(alphabet=st.characters(codec=None, categories=None)), st.integers(0, 50))
def test_a_truncated_text_always_fits_the_byte_limit(text, size):
    assert len(payloads.cut(text, size).encode()) <= size


@pytest.mark.parametrize(("wanted", "kept"), [(-1, 0), (0, 30), (1, 1), (12, 12), (200, 200), (201, 200)])
def test_a_job_keeps_as_many_backtrace_lines_as_it_requests(wanted, kept):
    """W17: the first lines are kept, 30 by default."""
    lines = [f"line {number}" for number in range(300)]
    assert list(payloads.limit_backtrace(lines, wanted)) == lines[:kept]


# --- priorities and times ---


@pytest.mark.parametrize(
    ("priority", "wire"),
    [(-100, 1), (-88, 1), (-87, 2), (-13, 4), (-12, 5), (0, 5), (12, 5), (13, 6), (87, 8), (88, 9), (100, 9)],
)
def test_a_priority_is_sent_as_the_nearest_of_nine_wire_priorities(priority, wire):
    assert payloads.priority_to_wire(priority) == wire


def test_every_wire_priority_round_trips():
    for wire in range(1, 10):
        assert payloads.priority_to_wire(payloads.priority_from_wire(wire)) == wire


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (T0, "2026-05-01T12:00:00Z"),
        (T0.replace(microsecond=120_000), "2026-05-01T12:00:00.12Z"),
        (T0.replace(microsecond=1), "2026-05-01T12:00:00.000001Z"),
        (T0.astimezone(timezone(timedelta(hours=5, minutes=30))), "2026-05-01T12:00:00Z"),
    ],
)
def test_times_are_written_in_utc_without_trailing_zeros(moment, text):
    assert payloads.rfc3339(moment) == text
    assert payloads.parse_instant("at", text) == moment


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-05-01t12:00:00z", T0),
        ("2026-05-01T14:00:00+02:00", T0),
        ("2026-05-01T12:00:00-00:00", T0),
        ("2026-05-01T12:00:00.5Z", T0.replace(microsecond=500_000)),
        ("2026-05-01T12:00:00.123456789Z", T0.replace(microsecond=123_456)),
        ("0001-01-01T00:00:00Z", datetime(1970, 1, 1, tzinfo=UTC)),
        ("1969-12-31T23:59:59Z", datetime(1970, 1, 1, tzinfo=UTC)),
    ],
)
def test_times_are_parsed_in_every_rfc_3339_spelling(text, moment):
    assert payloads.parse_instant("at", text) == moment


@given(st.datetimes(min_value=datetime(1970, 1, 1), timezones=st.just(UTC)))  # noqa: DTZ001  (`timezones` adds one)
def test_every_timestamp_round_trips_through_text(moment):
    assert payloads.parse_instant("at", payloads.rfc3339(moment)) == moment
