"""The public exceptions: one-line messages, and the codes sent over the wire."""

import pytest

from django_faktory import errors

pytestmark = pytest.mark.core


def every(cls):
    return [cls, *(found for child in cls.__subclasses__() for found in every(child))]


@pytest.mark.parametrize("cls", every(errors.FaktoryError), ids=lambda cls: cls.__name__)
def test_every_faktory_error_has_a_docstring_and_a_wire_code(cls):
    assert cls.__doc__
    assert cls.code == ("NOTUNIQUE" if cls is errors.NotUnique else "ERR")


@pytest.mark.parametrize(
    ("error", "text", "attributes"),
    [
        (errors.JobNotFound("12345678"), "Job not found 12345678", {"jid": "12345678"}),
        (errors.UnknownWorker("w1"), "unknown worker w1", {"wid": "w1"}),
        (errors.InvalidPayload("no"), "no", {"jid": ""}),
        (errors.InvalidPayload("no", jid="12345678"), "no", {"jid": "12345678"}),
        (errors.CommandRefused("Job not unique", code="NOTUNIQUE"), "Job not unique", {"code": "NOTUNIQUE"}),
        (errors.Retry(), "the task asked for a retry", {"in_s": None}),
        (errors.Retry("later", in_s=0), "later", {"in_s": 0}),
    ],
)
def test_errors_have_the_expected_message_and_attributes(error, text, attributes):
    assert str(error) == text
    assert {name: getattr(error, name) for name in attributes} == attributes


def test_retry_refuses_a_negative_delay():
    with pytest.raises(ValueError, match="in_s must be 0 or more seconds, got -1"):
        errors.Retry(in_s=-1)
