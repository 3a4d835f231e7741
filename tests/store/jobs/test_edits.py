"""Edit a job that is not running: only changed members are rewritten, and dependent columns follow."""

from datetime import timedelta

import pytest

from django_faktory.core.json import jsontext
from django_faktory.core.lifecycle import State
from django_faktory.errors import InvalidPayload, InvalidTransition, JobNotFound, NotUnique
from django_faktory.models import Job, Queue
from django_faktory.operations import edit as editing
from django_faktory.operations.edit import Changes, edit
from django_faktory.store.jobs import pushes
from django_faktory.store.store import Store
from tests.factories import T0, JobFactory, payload
from tests.project.tasks import add, once_a_group, send_invoice

pytestmark = [pytest.mark.portable, pytest.mark.django_db]


def job_in(state, **fields):
    return JobFactory(**({state: True} if state != "enqueued" else {}), **fields)


def changed(jid, **changes):
    return edit(jid, Changes(**changes), using="default")


def pushed(**fields):
    job = payload(**fields)
    assert pushes.push(Store(), [job]) == [None]
    return job.jid


@pytest.mark.parametrize("state", sorted(editing.EDITABLE - {State.BLOCKED}))
def test_an_edited_job_keeps_its_state_and_times(state):
    job = job_in(state)
    after = changed(job.jid, args=[1, {"a": [None]}], kwargs={"b": 2}, queue="low", priority=25)
    assert (after.state, after.queue, after.priority) == (state, "low", 25)
    assert (after.enqueued_at, after.run_at, after.failures) == (job.enqueued_at, job.run_at, job.failures)
    stored = jsontext.decode(after.payload)
    assert (stored["args"], stored["custom"]["kwargs"]) == ([1, {"a": [None]}], {"b": 2})
    assert (stored["queue"], stored["priority"]) == ("low", 6)


@pytest.mark.parametrize("state", sorted(set(State) - editing.EDITABLE))
def test_a_running_or_finished_job_cannot_be_edited(state):
    job = job_in(str(state))
    with pytest.raises(InvalidTransition, match=f"a job that is {state} cannot be edited"):
        changed(job.jid, queue="low")
    assert Job.objects.get().payload == job.payload


def test_an_edit_of_an_unknown_job_raises_job_not_found():
    with pytest.raises(JobNotFound):
        changed("no-such-job", queue="low")


def test_unchanged_payload_members_keep_their_exact_text():
    text = '{ "jid":"row-digits", "jobtype":"x","n": 1.0, "args":[1e2,99999999999999999999],"custom":{"k":1.50}}'
    job_in("dead", jid="row-digits", payload=text)
    after = changed("row-digits", queue="low")
    members = jsontext.members(after.payload)
    assert (members["args"], members["n"], members["custom"]) == ("[1e2,99999999999999999999]", "1.0", '{"k":1.50}')


def test_an_unchanged_priority_is_not_rounded_to_the_protocol_range():
    job = job_in("dead", sort_priority=-13)
    assert changed(job.jid, queue="low").priority == 13


@pytest.mark.parametrize("state", ["scheduled", "retries"])
def test_the_run_time_of_a_scheduled_or_retrying_job_can_be_changed(state):
    job, when = job_in(state), T0 + timedelta(days=400)
    assert changed(job.jid, run_at=when).run_at == when


@pytest.mark.parametrize("state", ["enqueued", "blocked", "dead"])
def test_setting_a_run_time_on_a_job_without_one_is_rejected(state):
    job = job_in(state)
    with pytest.raises(InvalidTransition, match="has no time to wait for"):
        changed(job.jid, run_at=T0)


@pytest.mark.parametrize("changes", [{"args": [1]}, {"args": [1, 2, 3]}, {"kwargs": {"c": 1}}], ids=str)
def test_arguments_that_the_task_does_not_accept_are_rejected(changes):
    job = job_in("dead", jobtype=add.jobtype)
    with pytest.raises(InvalidPayload, match="cannot be called with them"):
        changed(job.jid, **changes)


def test_arguments_of_a_job_without_a_python_task_are_not_checked():
    job = job_in("dead", jobtype="other.language")
    assert jsontext.decode(changed(job.jid, args=[1, 2, 3]).payload)["args"] == [1, 2, 3]


def test_editing_arguments_updates_the_unique_key_of_a_job():
    first, second = once_a_group.enqueue("a").id, once_a_group.enqueue("b").id
    with pytest.raises(NotUnique):
        changed(second, args=["a"])
    assert jsontext.decode(Job.objects.get(jid=second).payload)["args"] == ["b"]
    changed(first, args=["c"])
    changed(second, args=["a"])
    with pytest.raises(NotUnique):
        once_a_group.enqueue("a")


def test_an_edit_does_not_reacquire_a_released_unique_key():
    job = pushed(jobtype="x", args=["a"], custom={"unique_for": 60})
    Job.objects.filter(jid=job).update(unique_key=None)
    assert changed(job, args=["b"]).unique_key is None


def test_moving_a_job_to_another_queue_unblocks_the_next_of_its_key(django_capture_on_commit_callbacks):
    first, second, third = (pushed(jobtype="x", args=[n], custom={"lock": "k"}) for n in range(3))
    assert [job.state for job in Job.objects.order_by("pk")] == ["enqueued", "blocked", "blocked"]
    Job.objects.filter(jid=third).delete()
    with django_capture_on_commit_callbacks(execute=True):
        moved = changed(first, queue="other")
    assert moved.state == "enqueued"
    assert Job.objects.get(jid=second).state == "enqueued"


def test_a_job_edited_to_a_lock_key_with_another_job_is_blocked():
    by_arguments = [pushed(jobtype="x", args=[n], custom={"lock": True}) for n in range(2)]
    assert {job.state for job in Job.objects.all()} == {"enqueued"}
    after = changed(by_arguments[1], args=[0])
    assert (after.state, after.lock_key) == ("blocked", Job.objects.get(jid=by_arguments[0]).lock_key)
    assert changed(by_arguments[1], args=[5]).state == "enqueued"


def test_moving_a_job_to_a_new_queue_creates_the_queue(django_capture_on_commit_callbacks):
    job = send_invoice.enqueue(1).id
    with django_capture_on_commit_callbacks(execute=True):
        changed(job, queue="newly.made")
    assert Queue.objects.filter(name="newly.made").exists()
