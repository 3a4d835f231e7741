"""Arguments without a JSON type: their encoding, their decoding, and refusals."""

import base64
import re
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from uuid import UUID

import pytest
from django.contrib.auth.models import Group, User
from django.utils import timezone as django_timezone
from hypothesis import given
from hypothesis import strategies as st

from django_faktory import NotUnique
from django_faktory.core.json import jsontext
from django_faktory.core.payloads import Ack
from django_faktory.errors import InvalidArgument, InvalidPayload, MissingObject
from django_faktory.models import Job
from django_faktory.tasks import arguments
from django_faktory.tasks.arguments import decode_call, encode_call, may_have_references
from tests.project import tasks
from tests.project.models import Mark
from tests.tasks.work import work

pytestmark = pytest.mark.once_if_quick


def travelled(value):
    """Encode a value as args and as kwargs, through the text of a job, and return it decoded."""
    args, kwargs = encode_call([value], {"named": [value]})
    args, kwargs = decode_call(jsontext.decode(jsontext.encode(args)), jsontext.decode(jsontext.encode(kwargs)))
    assert kwargs == {"named": args}
    return args[0]


VALUES = [
    datetime(2026, 11, 21, 8, 40, 3, 123456, tzinfo=UTC),
    datetime(2026, 11, 21, 8, 40, tzinfo=timezone(timedelta(hours=-3, minutes=-30))),
    datetime(2026, 11, 21, 8, 40),  # noqa: DTZ001  (naive ones arrive naive)
    date(2026, 11, 21),
    time(8, 40, 3, 1),
    timedelta(days=-3, seconds=4, microseconds=5),
    timedelta(0),
    Decimal("1.20"),
    Decimal("-1E+400"),
    UUID(int=7),
]


@pytest.mark.core
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_keeps_its_type_through_encoding(value):
    found = travelled(value)
    assert (type(found), found, str(found)) == (type(value), value, str(value))


@pytest.mark.core
def test_typed_values_are_encoded_as_readable_json_objects():
    args, kwargs = encode_call([Decimal("1.20"), date(2026, 5, 1)], {"every": timedelta(hours=1)})
    assert args == [{"$type": "decimal", "value": "1.20"}, {"$type": "date", "value": "2026-05-01"}]
    assert kwargs == {"every": {"$type": "timedelta", "value": "P0DT01H00M00S"}}


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(VALUES),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from(["$type", "value", "$model", "pk", "using", "other"]) | st.text(), inner)
        | st.fixed_dictionaries({"$type": st.sampled_from(["date", "dict", "uuid", "x"]) | inner, "value": inner})
        | st.fixed_dictionaries({"$model": st.sampled_from(["auth.user", "x"]) | inner, "pk": inner})
    ),
    max_leaves=12,
)


@pytest.mark.core
@given(plain)
def test_user_data_is_never_mistaken_for_a_reference(value):
    assert travelled(value) == value


@pytest.mark.core
@given(plain)
def test_the_quick_reference_scan_has_no_false_negatives(value):
    args, _ = encode_call([value], {})
    text = jsontext.encode(args)
    assert may_have_references(text) or args == [value]


@pytest.mark.core
@pytest.mark.parametrize("value", [object(), {1, 2}, 1j, bytearray(b"x"), print, lambda: None, float("nan")])
def test_an_unsupported_argument_is_refused_with_its_position(value):
    error = ValueError if isinstance(value, float) else TypeError
    with pytest.raises(error, match=r"^args\[1\]\['deep'\]\[0\]: Unsupported "):
        encode_call(["a", {"deep": [value]}], {})
    with pytest.raises(error, match=r"^kwargs\['when'\]: Unsupported "):
        encode_call([], {"when": value})


@pytest.mark.core
def test_the_error_of_an_unsupported_argument_names_every_supported_type():
    with pytest.raises(TypeError) as refused:
        encode_call([object()], {})
    words = set(re.findall(r"\w+", str(refused.value).lower()))
    assert words >= {"none", "bool", "int", "float", "str", "list", "dict", "model", *arguments._DECODERS}


@pytest.mark.core
def test_plain_json_accepts_only_json_and_keeps_it_unchanged():
    with pytest.raises(TypeError, match=r"^args\[0\]: Unsupported type"):
        encode_call([date(2026, 5, 1)], {}, plain_json=True)
    like_ours = {"$type": "date", "value": "2026-05-01"}
    assert encode_call([like_ours], {}, plain_json=True) == ([like_ours], {})


@pytest.mark.core
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"$type": "date", "value": "yesterday"}, "expected the text of a date, got 'yesterday'"),
        ({"$type": "decimal", "value": "much"}, "expected the text of a decimal"),
        ({"$type": "timedelta", "value": "long"}, "expected the text of a timedelta"),
        ({"$type": "os.system", "value": "true"}, r"expected \{\"\$type\": one of date, .*plain_json=True"),
        ({"$type": "date", "value": 5}, "one of date"),
        ({"$type": ["date"], "value": "2026-05-01"}, "one of date"),
        ({"$model": "no.model", "pk": 1}, "no installed app has this model"),
        ({"$model": "os", "pk": 1}, "no installed app has this model"),
        ({"$model": 5, "pk": 1}, "no installed app has this model"),
        ({"$model": "auth.user", "pk": 1, "using": "elsewhere"}, "no database has the alias 'elsewhere'"),
    ],
)
def test_an_invalid_reference_is_refused_with_its_position(value, message):
    with pytest.raises(InvalidArgument, match=rf"^args\[1\]: .*{message}"):
        decode_call([1, [value]], {})


# --- model instances


@pytest.mark.django_db
def test_a_model_instance_is_sent_as_a_reference_and_fetched_again():
    user = User.objects.create(username="ada")
    args, _ = encode_call([user], {})
    assert args == [{"$model": "auth.user", "pk": user.pk}]
    User.objects.update(username="grace")
    [found], _ = decode_call(args, {})
    assert (type(found), found.pk, found.username) == (User, user.pk, "grace"), "the row as of when the task runs"


@pytest.mark.django_db
def test_an_unsaved_instance_is_refused():
    with pytest.raises(ValueError, match=r"^args\[0\]: an unsaved auth.user: save it first"):
        encode_call([User(username="ada")], {})
    with pytest.raises(ValueError, match="unsaved"):
        encode_call([User(pk=5)], {})


@pytest.mark.django_db
@pytest.mark.parametrize("pk", ["no number", [1, 2], {"a": 1}, None])
def test_an_invalid_primary_key_in_a_reference_is_refused(pk):
    with pytest.raises((InvalidArgument, MissingObject)):
        decode_call([{"$model": "auth.user", "pk": pk}], {})


@pytest.mark.django_db(transaction=True)
def test_a_task_receives_arguments_with_their_original_types():
    user, when = User.objects.create(username="ada"), django_timezone.now()
    result = tasks.returns_types.enqueue(user, when, price=Decimal("1.2"))
    assert work().result == jsontext.encode({"args": ["User", "datetime"], "kwargs": {"price": "Decimal"}})
    stored = Job.objects.get(jid=result.id)
    assert f'"args":[{{"$model":"auth.user","pk":{user.pk}}}' in stored.payload


@pytest.mark.django_db(transaction=True)
def test_results_show_arguments_in_their_encoded_form():
    user = User.objects.create(username="ada")
    result = tasks.returns_its_arguments.enqueue(user)
    references = [{"$model": "auth.user", "pk": user.pk}]
    assert result.args == references
    assert work().result == jsontext.encode(references)
    assert tasks.returns_its_arguments.get_result(result.id).args == references


@pytest.mark.django_db(transaction=True)
def test_a_deleted_row_fails_the_job_with_a_message_naming_it():
    user = User.objects.create(username="ada")
    tasks.returns_types.enqueue(user)
    pk = user.pk
    user.delete()
    report = work()
    assert (report.errtype, report.verdict) == ("MissingObject", "")
    assert report.message == f"args[0]: auth.User {pk} does not exist any more"
    assert Job.objects.get().state == "retries"


@pytest.mark.django_db(transaction=True)
def test_a_task_can_discard_its_job_if_a_row_was_deleted():
    group = Group.objects.create(name="a")
    tasks.drops_missing_row.enqueue(group)
    group.delete()
    report = work()
    assert (report.errtype, report.verdict) == ("django_faktory.errors.Discard", "discard")
    assert "does not exist any more" in report.message
    assert Job.objects.get().state == "discarded"


@pytest.mark.django_db(transaction=True)
def test_an_invalid_reference_kills_the_job():
    tasks.returns_types.enqueue(1)
    Job.objects.update(payload=Job.objects.get().payload.replace('"args":[1]', '"args":[{"$type":"date","value":"x"}]'))
    report = work()
    assert (report.errtype, report.verdict) == ("InvalidArgument", "kill")
    assert Job.objects.get().state == "dead"


@pytest.mark.django_db(transaction=True)
def test_an_async_task_receives_its_model_instances():
    tasks.async_returns_types.enqueue(Group.objects.create(name="a"))
    assert isinstance(work(), Ack)


@pytest.mark.django_db(transaction=True)
def test_an_atomic_task_reads_its_rows_in_its_transaction():
    tasks.writes_name_atomically.enqueue(Group.objects.create(name="a"))
    assert work() is None
    assert list(Mark.objects.values_list("text", flat=True)) == ["a in transaction: True"]


@pytest.mark.django_db(transaction=True)
def test_a_client_in_another_language_may_write_references():
    group = Group.objects.create(name="a")
    tasks.returns_types.enqueue(1)
    payload = Job.objects.get().payload
    Job.objects.update(
        payload=payload.replace('"args":[1]', f'"args":[{{"\\u0024model":"auth.Group","pk":{group.pk}}}]')
    )
    assert jsontext.decode(work().result)["args"] == ["Group"]


@pytest.mark.django_db(transaction=True)
def test_unique_for_treats_calls_with_the_same_row_as_duplicates():
    group = Group.objects.create(name="a")
    tasks.once_a_group.enqueue(group)
    with pytest.raises(NotUnique):
        tasks.once_a_group.enqueue(Group.objects.get())


def test_plain_json_arguments_are_never_fetched_as_rows(transactional_db):
    tasks.takes_plain_json.enqueue({"$model": "auth.user", "pk": 1})
    assert work().result == '{"$model":"auth.user","pk":1}'
    assert not Job.objects.filter(state="enqueued").exists()


@pytest.mark.parametrize("value", ["x", "", 5, None, {"a": 1}, "gAAAA", "not a token " * 20])
def test_plain_json_that_looks_like_an_encryption_envelope_is_accepted(transactional_db, value):
    tasks.takes_plain_json.enqueue({"$encrypted": value, "same": 1})
    assert jsontext.decode(work().result) == {"$encrypted": value, "same": 1}


def test_a_fernet_token_as_plain_json_is_refused_at_enqueue(transactional_db):
    """A worker could not distinguish the token from an encrypted argument."""
    token = base64.urlsafe_b64encode(b"\x80" + bytes(72)).decode()
    with pytest.raises(InvalidPayload, match=r"args\[0\]: expected no Fernet token"):
        tasks.takes_plain_json.enqueue({"$encrypted": token})
    tasks.takes_plain_json.enqueue([{"$encrypted": token}])
    assert jsontext.decode(work().result) == [{"$encrypted": token}]
