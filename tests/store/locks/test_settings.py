"""Wrong lock settings are reported at the start, each with its id and a hint: cases L12 to L15; E1 to E5, W1 to W3."""

import pytest
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.test import override_settings

from django_faktory.checks import settings
from django_faktory.core.locket import locket

pytestmark = pytest.mark.core


def found(**changes):
    with override_settings(FAKTORY={"LOCKET": {**locket(), **changes.pop("locket", {})}, **changes}):
        messages = settings.check_settings()
    assert all(message.hint for message in messages)
    return [message.id.removeprefix("django_faktory.") for message in messages]


@pytest.mark.parametrize("heartbeat", [0, -1, True, "x", float("nan"), float("inf"), None])
def test_a_heartbeat_frequency_must_be_a_finite_number_above_0(heartbeat):
    """Check that zero, booleans and infinity are errors too (L12, E1)."""
    assert found(locket={"HEARTBEAT_FREQUENCY": heartbeat}) == ["E031"]


@pytest.mark.parametrize("duration", [0, -1, 4.3, "fun!", True, None])
def test_a_lock_duration_must_be_a_positive_whole_number_of_seconds(duration):
    """Check that fractions and booleans are errors too (L13, E2)."""
    assert found(locket={"JOB_LOCK_DURATION": duration}) == ["E032"]


def test_a_lock_duration_of_30_seconds_is_valid():
    """Check a valid pair of lease and heartbeat (L13)."""
    assert found(locket={"JOB_LOCK_DURATION": 30, "HEARTBEAT_FREQUENCY": 20}) == []


def test_a_lock_duration_below_the_heartbeat_interval_is_an_error():
    """Check a lease shorter than the heartbeat interval (L14, E3)."""
    assert found(locket={"HEARTBEAT_FREQUENCY": 60, "JOB_LOCK_DURATION": 40}) == ["E033"]


def test_a_lock_duration_equal_to_the_heartbeat_interval_is_a_warning():
    """Check a lease equal to the heartbeat interval (L15, W1)."""
    assert found(locket={"HEARTBEAT_FREQUENCY": 35, "JOB_LOCK_DURATION": 35}) == ["W031"]


@pytest.mark.parametrize("queues", ["mail", 7, [1], {"mail": 1}])
def test_queues_must_be_a_list_of_names(queues):
    """Check strings, numbers and dicts for QUEUES (E4)."""
    assert found(locket={"QUEUES": queues}) == ["E034"]


@pytest.mark.parametrize("key", [7, "nodots", "no.such.function", "django_faktory.core.locket.DEFAULTS"])
def test_a_lock_key_must_be_a_callable_or_its_import_path(key):
    """Check values and paths that name no function (E5)."""
    assert found(locket={"JOB_LOCK_KEY": key}) == ["E035"]


@pytest.mark.parametrize("key", [str, "tests.store.locks.test_settings.by_type"])
def test_a_function_or_its_path_is_a_valid_lock_key(key):
    assert found(locket={"JOB_LOCK_KEY": key}) == []


def by_type(job):
    return job.jobtype


def test_a_lock_duration_under_two_beats_of_other_workers_is_a_warning():
    """Check a lease under 30 s: other languages' workers send BEAT every 15 s, and one may be late (W2)."""
    assert found(locket={"HEARTBEAT_FREQUENCY": 10, "JOB_LOCK_DURATION": 25}) == ["W032"]


def test_a_beat_interval_too_long_for_the_lease_is_a_warning():
    """Check BEAT_INTERVAL against the lease (W3)."""
    assert "W033" in found(locket={"HEARTBEAT_FREQUENCY": 33}, BEAT_INTERVAL=31.0, WORKER_TIMEOUT=70)


def test_a_short_beat_interval_within_a_short_lease_is_no_warning():
    short = {"HEARTBEAT_FREQUENCY": 1, "JOB_LOCK_DURATION": 3}
    assert "W033" not in found(locket=short, BEAT_INTERVAL=0.5, WORKER_TIMEOUT=9)


@pytest.mark.parametrize("wrong", [[], "yes", {"ENABLE": True}, {"ENABLED": "yes"}])
def test_a_malformed_locket_setting_is_reported(wrong):
    with override_settings(FAKTORY={"LOCKET": wrong}):
        assert [message.id for message in settings.check_settings()] == ["django_faktory.E036"]


@pytest.mark.django_db(databases="__all__")  # Django 6.1 asks them whether they support JSON
def test_the_check_command_fails_with_a_hint_for_the_fix():
    with (
        override_settings(FAKTORY={"LOCKET": {**locket(), "QUEUES": "mail"}}),
        pytest.raises(SystemCheckError, match=r"(?s)E034.*HINT: Write \[.name.\]"),
    ):
        call_command("check")
