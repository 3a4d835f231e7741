"""Test encrypted arguments: only the worker decrypts them, with any of the keys, and a missing key loses no job."""

import json
import sys

import pytest
from cryptography.fernet import Fernet
from django.core.checks import run_checks
from django.test import override_settings
from django.urls import reverse

from django_faktory import Batch, NotUnique, task
from django_faktory.core.job_parser import parse_job
from django_faktory.core.payloads import FetchRequest
from django_faktory.errors import CannotDecrypt, CannotEncrypt, InvalidPayload
from django_faktory.models import Job
from django_faktory.operations import edit
from django_faktory.operations.edit import Changes
from django_faktory.store.jobs import claims, pushes
from django_faktory.store.store import Store
from django_faktory.tasks import base, encryption
from django_faktory.testing import assert_enqueued, drain
from django_faktory.worker.execution import prepare
from tests.factories import payload
from tests.project.models import Mark
from tests.project.tasks import add, async_add, echo, flaky
from tests.waiting import wait_until

pytestmark = pytest.mark.once

MARKER = "m4rk3r-1n-args"
OLD, NEW, OTHER = (Fernet.generate_key().decode() for _ in range(3))


def keys(*names, **more):
    return override_settings(FAKTORY={"ENCRYPTION_KEYS": list(names), "ENCRYPT_ARGUMENTS": True} | more)


@pytest.fixture
def encrypting(transactional_db):
    with keys(NEW):
        yield


@task(encrypt=True)
def always(secret, *, also=None):
    return {"secret": secret, "also": also}


@task(encrypt=False)
def never(secret):
    return secret


@task(encrypt=True, unique_for=600)
def only_one(secret):
    pass


@task(encrypt=True, lock=True)
def one_at_a_time(secret):
    pass


@task(encrypt=True, max_attempts=1)
def once(secret):
    pass


@task(encrypt=True, atomic=True)
def marks(note):
    Mark.objects.create(text=note)


OURS = {one.jobtype: base._registry.pop(one.jobtype) for one in (always, never, only_one, one_at_a_time, once, marks)}
"""Registered only while these tests run: the system checks report a task that needs a key if none is configured."""


@pytest.fixture(autouse=True)
def known(monkeypatch):
    for name, one in OURS.items():
        monkeypatch.setitem(base._registry, name, one)


def stored():
    return "".join(job.payload + (job.result or "") + job.failure + job.history for job in Job.objects.all())


def fetched():
    [[held]] = claims.fetch(Store(), [FetchRequest(queues=("default",), wid="w")])
    return held


def test_arguments_and_result_are_stored_encrypted_and_the_task_gets_them_decrypted(encrypting, work, state):
    result = echo.enqueue(MARKER, 7, also={"deep": [MARKER]})
    [sent] = Job.objects.values_list("payload", flat=True)
    assert json.loads(sent)["args"][0].keys() == {"$encrypted"}
    assert "kwargs" not in json.loads(sent)["custom"]
    work()
    job = state(result, "succeeded")
    assert MARKER not in stored()
    assert json.loads(job.result).keys() == {"$encrypted"}
    loaded = echo.get_result(result.id)
    assert loaded.return_value == {"args": [MARKER, 7], "kwargs": {"also": {"deep": [MARKER]}}}
    assert MARKER not in str(loaded.args)
    assert MARKER not in repr(loaded)


@pytest.mark.parametrize("value", ["", "ü\ud800", 10**40, 1.5, None, [], {"$encrypted": "x"}, {"$type": "date"}])
def test_every_argument_value_is_decrypted_unchanged(encrypting, value):
    echo.enqueue(value)
    execution = prepare(fetched())
    args, kwargs = execution.result.args, execution.result.kwargs
    assert (args, kwargs) == ([value if not isinstance(value, dict) else {"$type": "dict", "value": value}], {})


def test_async_atomic_and_bulk_enqueued_tasks_are_encrypted(encrypting, work, state):
    marked = marks.enqueue(MARKER)
    many = echo.enqueue_many([(MARKER,), {"also": MARKER}])
    added = async_add.enqueue(20, 22)
    assert MARKER not in stored()
    work()
    for one in (marked, *many, added):
        state(one, "succeeded")
    assert Mark.objects.filter(text=MARKER).exists()
    assert async_add.get_result(added.id).return_value == 42


def test_arguments_stay_encrypted_across_retries(encrypting, work, state, start_maintenance):
    result = flaky.enqueue(2)
    start_maintenance()
    work()
    job = state(result, "succeeded")
    assert job.failures == 2
    assert json.loads(job.payload)["args"][0].keys() == {"$encrypted"}


def test_arguments_of_batch_callbacks_are_encrypted(encrypting, work, state):
    with Batch(success=echo.callback(MARKER)) as batch:
        inside = echo.enqueue(MARKER)
    assert MARKER not in stored()
    work()
    state(inside, "succeeded")
    callback = wait_until(lambda: Job.objects.filter(callback_of=batch.bid, state="succeeded").first())
    assert MARKER not in callback.payload
    assert echo.get_result(callback.jid).return_value["args"] == [MARKER]


def test_a_task_option_overrides_the_encryption_setting(transactional_db):
    with keys(NEW):
        never.enqueue(MARKER)
    with override_settings(FAKTORY={"ENCRYPTION_KEYS": [NEW]}):
        always.enqueue("hidden-word")
        echo.enqueue("plain-word")
    assert MARKER in stored()
    assert "plain-word" in stored()
    assert "hidden-word" not in stored()


def test_the_first_key_encrypts_and_every_key_decrypts(transactional_db):
    with keys(OLD):
        always.enqueue(MARKER)
    with keys(NEW, OLD):
        assert prepare(fetched()).result.args == [MARKER]
        always.enqueue(MARKER)
        held = fetched()
    with keys(NEW):
        assert prepare(held).result.args == [MARKER]


@pytest.mark.parametrize("names", [[], [OTHER], ["no key"]])
def test_a_job_without_its_key_is_retried_until_the_key_is_available(transactional_db, work, state, names):
    with keys(NEW):
        result = always.enqueue(MARKER)
    with override_settings(FAKTORY={"ENCRYPTION_KEYS": names}):
        failing = work()
        job = state(result, "retries")
        failing.stop()
        assert failing.ended()
    assert json.loads(job.failure)["errtype"] == "CannotDecrypt"
    assert "ENCRYPTION_KEYS" in json.loads(job.failure)["message"]
    Job.objects.all().requeue()
    with keys(NEW):
        work()
        state(result, "succeeded")


def test_a_job_without_retries_becomes_dead_if_its_key_is_missing(transactional_db, work, state):
    with keys(NEW):
        result = once.enqueue(MARKER)
        raw = payload(
            jobtype=once.jobtype,
            args=encryption.encrypt_arguments(once.jobtype, [1], {}, with_fingerprint=False),
            retry=0,
        )
        pushes.push(Store(), [raw])
    with keys(OTHER):
        work()
        assert state(result, "dead").payload
        wait_until(lambda: Job.objects.filter(jid=raw.jid, state="dead").exists())


def test_encrypted_arguments_of_one_jobtype_are_rejected_by_another(encrypting):
    args = encryption.encrypt_arguments("tests.project.tasks.noop", [MARKER], {}, with_fingerprint=False)
    pushes.push(Store(), [payload(jobtype=echo.jobtype, args=args)])
    failure = prepare(fetched())
    assert (failure.errtype, failure.verdict) == ("InvalidPayload", "kill")
    assert "another jobtype" in failure.message


def test_a_tampered_token_cannot_be_decrypted(encrypting):
    [envelope] = encryption.encrypt_arguments("noop", [MARKER], {}, with_fingerprint=False)
    token = envelope["$encrypted"]
    spoilt = f"{token[:-20]}{'A' if token[-20] != 'A' else 'B'}{token[-19:]}"
    with pytest.raises(CannotDecrypt):
        encryption.decrypt_arguments("noop", [{"$encrypted": spoilt}])


def test_uniqueness_and_locks_compare_encrypted_arguments_without_revealing_them(encrypting):
    only_one.enqueue(MARKER)
    with pytest.raises(NotUnique):
        only_one.enqueue(MARKER)
    only_one.enqueue("another")
    first, second, other = (one_at_a_time.enqueue(secret) for secret in (MARKER, MARKER, "another"))
    found = dict(Job.objects.values_list("jid", "lock_key"))
    assert found[first.id] == found[second.id] != found[other.id]
    assert MARKER not in stored() + str(found)


def test_ordinary_jobs_store_no_fingerprint_of_their_arguments(encrypting):
    echo.enqueue_many([(MARKER,), (MARKER,)])
    assert "same" not in stored()


def test_protocol_clients_receive_the_envelope_and_can_push_it_again(encrypting):
    only_one.enqueue(MARKER)
    wire = fetched().wire()
    assert MARKER not in wire
    again = parse_job(wire)
    assert again.options.unique_key == Job.objects.get().unique_key


def test_encrypted_arguments_cannot_be_edited_and_other_fields_can(encrypting, admin_client):
    result = echo.enqueue(MARKER)
    before = Job.objects.get(jid=result.id)
    for changes in (Changes(args=[1]), Changes(kwargs={"a": 1})):
        with pytest.raises(InvalidPayload, match="encrypted and cannot be edited"):
            edit.edit(result.id, changes, using="default")
    page = admin_client.post(reverse("admin:django_faktory_job_edit", args=[before.pk]), {"args": "[]", "kwargs": "{}"})
    assert "encrypted and cannot be edited" in page.content.decode()
    edit.edit(result.id, Changes(queue="mail", priority=50), using="default")
    after = Job.objects.get(jid=result.id)
    assert (after.queue, json.loads(after.payload)["args"]) == ("mail", json.loads(before.payload)["args"])


def test_admin_and_api_show_only_the_envelope(encrypting, admin_client):
    job = Job.objects.get(jid=echo.enqueue(MARKER).id)
    page = admin_client.get(reverse("admin:django_faktory_job_change", args=[job.pk])).content.decode()
    answer = admin_client.get(f"/api/jobs/{job.jid}/").content.decode()
    assert "$encrypted" in page
    assert "$encrypted" in answer
    assert MARKER not in page + answer


def test_enqueueing_without_a_key_fails_and_stores_nothing(transactional_db):
    with override_settings(FAKTORY={"ENCRYPT_ARGUMENTS": True}), pytest.raises(CannotEncrypt, match="got none"):
        echo.enqueue(MARKER)
    assert not Job.objects.exists()


def test_unencrypted_jobs_do_not_require_the_cryptography_library(transactional_db, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.fernet", None)
    add.enqueue(20, 22)
    assert prepare(fetched()).result.args == [20, 22]


def find_errors(**settings):
    with override_settings(FAKTORY=settings):
        return [message for message in run_checks() if message.id == "django_faktory.E060"]


@pytest.mark.django_db(databases=["default", "other"])
def test_system_checks_report_invalid_keys_and_a_missing_library(monkeypatch):
    bad = "s3cr3t-but-no-k3y"
    [message] = find_errors(ENCRYPTION_KEYS=[NEW, bad])
    assert "32 bytes" in message.msg
    assert bad not in f"{message.msg} {message.hint}"
    [message] = find_errors(ENCRYPT_ARGUMENTS=True)
    assert "got none" in message.msg
    assert find_errors(ENCRYPT_ARGUMENTS=True, ENCRYPTION_KEYS=[NEW]) == []
    encryption._make_fernet.cache_clear()
    monkeypatch.setitem(sys.modules, "cryptography.fernet", None)
    [message] = find_errors(ENCRYPT_ARGUMENTS=True, ENCRYPTION_KEYS=[NEW])
    assert 'pip install "django-faktory[crypto]"' in message.msg


@pytest.mark.django_db(databases=["default", "other"])
def test_an_invalid_keys_setting_is_reported_without_the_keys():
    with override_settings(FAKTORY={"ENCRYPTION_KEYS": MARKER}):
        found = [message for message in run_checks() if message.id == "django_faktory.E002"]
    assert len(found) == 1
    assert MARKER not in str(found)


def test_testing_helpers_decrypt_arguments(encrypting):
    echo.enqueue(MARKER, also=7)
    assert_enqueued(echo, args=[MARKER], kwargs={"also": 7})
    [ran] = drain()
    assert (ran.state, ran.result.return_value["args"]) == ("succeeded", [MARKER])


@pytest.mark.django_db(transaction=True)
def test_the_immediate_backend_runs_encrypted_jobs():
    immediate = {"default": {"BACKEND": "django_faktory.testing.backends.ImmediateBackend", "QUEUES": []}}
    with keys(NEW), override_settings(TASKS=immediate):
        result = echo.enqueue(MARKER)
        marks.enqueue(MARKER)
    assert result.return_value["args"] == [MARKER]
    assert Mark.objects.filter(text=MARKER).exists()
