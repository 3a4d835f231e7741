"""The database refuses any row of a job that no query would find again, from any writer."""

from datetime import UTC, datetime

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from django_faktory.core.lifecycle import State
from django_faktory.models import Job

pytestmark = pytest.mark.django_db

T = datetime(2026, 5, 1, tzinfo=UTC)
ENDED = {"finished_at": T, "purge_at": T}
SOUND = {
    "enqueued": {"enqueued_at": T},
    "blocked": {"enqueued_at": T},
    "working": {"attempt": 1, "reserved_until": T},
    "scheduled": {"run_at": T},
    "retries": {"run_at": T},
    "dead": ENDED,
    "succeeded": ENDED,
    "discarded": ENDED,
    "expired": ENDED,
}
UNSOUND = [
    *((state, {field: None}) for state, fields in SOUND.items() for field in fields if field != "attempt"),
    *((state, {"sort_priority": sort_priority}) for state in SOUND for sort_priority in (-101, 101)),
    *((state, {"limiter": 1}) for state in SOUND if state not in ("enqueued", "blocked")),
    *((state, {"permits": ""}) for state in SOUND if state != "working"),
    ("working", {"attempt": 0}),
    ("unheard", ENDED | {"enqueued_at": T, "run_at": T}),
    ("Enqueued", {"enqueued_at": T}),
    ("", {"enqueued_at": T}),
]


def row(state, **fields):
    return Job(jid="job-0001", jobtype="t", queue="default", payload="{}", state=state, **fields)


def test_the_sound_example_rows_cover_every_state():
    assert set(SOUND) == set(State)


@pytest.mark.parametrize("state", SOUND)
@pytest.mark.parametrize("more", [{}, {"sort_priority": -100}, {"sort_priority": 100}], ids=str)
def test_a_sound_row_is_stored(state, more):
    row(state, **SOUND[state] | more).save()


@pytest.mark.parametrize(
    ("state", "more"), [("enqueued", {"limiter": 1}), ("blocked", {"limiter": 1}), ("working", {"permits": "1"})]
)
def test_a_row_with_a_limiter_or_permits_is_stored(state, more):
    row(state, **SOUND[state] | more).save()


@pytest.mark.parametrize(("state", "fault"), UNSOUND, ids=str)
def test_an_unsound_row_is_refused(state, fault):
    with pytest.raises(IntegrityError, match="faktory_job_sound"), transaction.atomic():
        row(state, **SOUND.get(state, {}) | fault).save()


def test_a_change_that_would_make_a_row_unsound_is_refused():
    row("enqueued", enqueued_at=T).save()
    with pytest.raises(IntegrityError), transaction.atomic():
        Job.objects.update(state="working")
    assert Job.objects.get().state == "enqueued"


def test_form_validation_detects_an_unsound_row():
    row("retries", run_at=T).validate_constraints()
    with pytest.raises(ValidationError, match="faktory_job_sound"):
        row("retries").validate_constraints()
