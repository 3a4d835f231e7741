"""Test `manage.py faktory edit` and `locks`."""

import io
import re
from datetime import timedelta

import pytest
from django.utils import timezone

from django_faktory.models import Job, JobLock
from tests.factories import JobFactory, LockFactory, QueueFactory
from tests.project.tasks import add

pytestmark = [pytest.mark.once, pytest.mark.django_db]


def test_edit_changes_the_given_parts_of_a_job(asked, faktory):
    QueueFactory(name="low")
    text = f'{{"jid":"job-of-edit","jobtype":"{add.jobtype}","args":[1,2]}}'
    job = JobFactory(dead=True, jobtype=add.jobtype, payload=text)
    document = asked("edit", job.jid, "--args", "[3]", "--kwargs", '{"b": 4}', "--queue", "low", "--priority", -20)
    assert (document["job"]["args"], document["job"]["custom"]["kwargs"]) == ([3], {"b": 4})
    assert (document["queue"], document["priority"], document["state"]) == ("low", -20, "dead")
    assert faktory("edit", job.jid, "--priority", 0).out == f"edit: priority of {job.jid}; the job is dead\n"


def test_edit_sets_the_time_of_a_scheduled_job(asked):
    job = JobFactory(scheduled=True)
    asked("edit", job.jid, "--in", "2h")
    assert timedelta(hours=1) < Job.objects.get(pk=job.pk).run_at - timezone.now() < timedelta(hours=3)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), 1),
        (("--args", "{}"), 1),
        (("--args", "[1"), 1),
        (("--kwargs", "[]"), 1),
        (("--queue", "no such queue"), 1),
        (("--in", "soon"), 1),
        (("--args", "[1,2,3]"), 1),
    ],
)
def test_an_invalid_edit_is_rejected_in_one_line(faktory, words, code):
    job = JobFactory(jobtype=add.jobtype)
    answer = faktory("edit", job.jid, *words)
    assert (answer.code, answer.out, len(answer.err.splitlines())) == (code, "", 1)
    assert Job.objects.get(pk=job.pk).payload == job.payload


def test_a_tasks_module_that_cannot_be_imported_keeps_no_job_from_being_edited(faktory, broken_app):
    broken_app("import no_such_thing\n")
    job = JobFactory(jobtype=add.jobtype, payload=f'{{"jid":"job-of-edit","jobtype":"{add.jobtype}","args":[1,2]}}')
    assert faktory("edit", job.jid, "--args", "[3,4]").code == 0
    assert faktory("edit", job.jid, "--args", "[1,2,3]").code == 1


@pytest.mark.parametrize("jid", ["nosuchjob", "a\x00"])
def test_an_unknown_job_exits_with_2(faktory, jid):
    assert faktory("edit", jid, "--priority", 5).code == 2


# --- locks


@pytest.fixture
def lock():
    holder = JobFactory(working=True, lock_key="shop 1")
    made = LockFactory(key="shop 1", jid=holder.jid, expires_at=timezone.now() + timedelta(minutes=2))
    Job.objects.filter(pk=holder.pk).update(lock_token=made.pk)
    JobFactory(blocked=True, lock_key="shop 1")
    return made


def test_locks_shows_keys_holders_and_the_number_of_waiting_jobs(asked, faktory, lock):
    [document] = asked("locks")["locks"]
    found = tuple(document[name] for name in ("token", "key", "jid", "waiting"))
    assert found == (lock.pk, "shop 1", lock.jid, 1)
    assert "shop 1" in faktory("locks", "list", "shop 1").out
    assert faktory("locks", "list", "shop 2").code == 2


def test_a_key_beyond_the_limit_of_the_list_is_not_reported_as_unlocked(faktory, lock):
    for key in ("shop 3", "shop 4"):
        LockFactory(key=key, expires_at=lock.expires_at)
    answer = faktory("locks", "list", "shop 1", "shop 2", "shop 3", "shop 4", "--limit", "1")
    assert re.findall(r"no job has a lock of the key (.*)", answer.err) == ["shop 2"]


def test_release_asks_and_makes_the_next_job_ready(asked, faktory, lock, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "add --yes" in faktory("locks", "release", lock.pk).err
    assert JobLock.objects.exists()
    assert asked("locks", "release", lock.pk, "--yes") == {"changed": 1}
    assert not Job.objects.blocked().exists()


@pytest.mark.parametrize(("words", "code"), [((), 1), (("shop 1",), 1), (("999999999",), 2), (("9" * 30,), 1)])
def test_release_requires_tokens_of_present_locks(faktory, lock, words, code):
    assert faktory("locks", "release", *words, "--yes").code == code
    assert JobLock.objects.filter(pk=lock.pk).exists()
