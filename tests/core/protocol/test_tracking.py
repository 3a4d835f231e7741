"""TRACK as text, in both directions: what is accepted, refused and returned. Rules: W5, W27."""

from datetime import UTC, datetime

import pytest

from django_faktory.core.payloads import Tracked, TrackUpdate
from django_faktory.core.protocol.commands import parse
from django_faktory.core.protocol.tracking import TrackGet, TrackSet, format_tracked, parse_tracked
from django_faktory.errors import InvalidPayload

pytestmark = pytest.mark.core


@pytest.mark.parametrize(("get", "set_"), [("get", "set"), ("GET", "SET"), ("Get", "sEt"), ("  get", "  set")])
def test_the_track_subcommand_is_case_insensitive(get, set_):
    """W5: for the server, "get" and "GET" are the same."""
    assert parse(f"TRACK {get} job-0001 ") == TrackGet("job-0001")
    assert parse(f'TRACK {set_} {{"jid":"job-0001"}}') == TrackSet(TrackUpdate(jid="job-0001"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("TRACK", "invalid TRACK: expected SET {…} or GET jid, got nothing"),
        ("TRACK DROP job", "invalid TRACK: expected SET {…} or GET jid, got DROP"),
        ("TRACK GET", "invalid TRACK GET: expected the jid of a job"),
        ("TRACK SET", "invalid TRACK SET : invalid JSON: "),
        ("TRACK SET []", "invalid TRACK SET []: expected an object {…}"),
        ("TRACK SET {}", "invalid TRACK SET: jid: expected the jid of a job"),
        ('TRACK SET {"jid":5}', "invalid TRACK SET: jid: expected a string, got 5"),
        ('TRACK SET {"jid":"j","percent":101}', "percent: expected an integer from 0 to 100, got 101"),
        ('TRACK SET {"jid":"j","percent":-1}', "percent: expected an integer from 0 to 100, got -1"),
        ('TRACK SET {"jid":"j","percent":1.5}', "percent: expected an integer, got 1.5"),
        ('TRACK SET {"jid":"j","percent":true}', "percent: expected an integer, got True"),
        ('TRACK SET {"jid":"j","desc":5}', "desc: expected a string, got 5"),
        ('TRACK SET {"jid":"j","reserve_until":"soon"}', "invalid timestamp for 'reserve_until': "),
    ],
)
def test_a_malformed_track_command_is_refused_with_a_one_line_reason(line, message):
    with pytest.raises(InvalidPayload) as caught:
        parse(line)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_description_is_truncated_and_nul_characters_are_replaced():
    command = parse('TRACK SET {"jid":"j","desc":"a\\u0000' + "é" * 1000 + '"}')
    assert command.update.desc.startswith("a\ufffdé")
    assert 995 < len(command.update.desc.encode()) <= 1000


def test_an_unknown_job_is_reported_as_by_the_original_server():
    text = format_tracked(Tracked(jid="job-0001"))
    assert text == '{"jid":"job-0001","state":"unknown","updated_at":""}'
    assert parse_tracked({"jid": "job-0001", "state": "unknown", "updated_at": ""}) == Tracked(jid="job-0001")


def test_all_known_fields_of_a_tracked_job_are_reported():
    tracked = Tracked(
        jid="job-0001", percent=5, desc="d", state="working", updated_at=datetime(2026, 5, 1, 12, tzinfo=UTC)
    )
    assert format_tracked(tracked) == (
        '{"jid":"job-0001","percent":5,"desc":"d","state":"working","updated_at":"2026-05-01T12:00:00Z"}'
    )
