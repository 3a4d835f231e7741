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


CASES = [
    *[({"HEARTBEAT_FREQUENCY": value}, ["E031"]) for value in (0, -1, True, "x", float("nan"), float("inf"), None)],
    *[({"JOB_LOCK_DURATION": value}, ["E032"]) for value in (0, -1, 4.3, "fun!", True, None)],
    ({"JOB_LOCK_DURATION": 30, "HEARTBEAT_FREQUENCY": 20}, []),
    ({"HEARTBEAT_FREQUENCY": 60, "JOB_LOCK_DURATION": 40}, ["E033"]),
    ({"HEARTBEAT_FREQUENCY": 35, "JOB_LOCK_DURATION": 35}, ["W031"]),
    # Workers of other languages send BEAT every 15 s, and one may be late.
    ({"HEARTBEAT_FREQUENCY": 10, "JOB_LOCK_DURATION": 25}, ["W032"]),
    *[({"QUEUES": value}, ["E034"]) for value in ("mail", 7, [1], {"mail": 1})],
    *[
        ({"JOB_LOCK_KEY": value}, ["E035"])
        for value in (7, "nodots", "no.such.function", f"{locket.__module__}.DEFAULTS")
    ],
    *[({"JOB_LOCK_KEY": value}, []) for value in (str, f"{__name__}.by_type")],
]


@pytest.mark.parametrize(("changes", "ids"), CASES)
def test_a_wrong_lock_setting_is_reported_by_its_own_id(changes, ids):
    """Cases L12 to L15; E1 to E5, W1 and W2."""
    assert found(locket=changes) == ids


def by_type(job):
    return job.jobtype


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
