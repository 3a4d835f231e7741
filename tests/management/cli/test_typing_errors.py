"""Every subcommand that takes a name refuses one that is misspelt, and suggests the right one."""

import pytest
from django.core.management import ManagementUtility
from django.utils import timezone

from django_faktory.models import CronEntry, Job, Limit, Queue, WorkerProcess
from django_faktory.store.cron import entries
from django_faktory.tasks import base
from tests.factories import JobFactory, QueueFactory, WorkerFactory
from tests.project.tasks import add

pytestmark = [pytest.mark.once, pytest.mark.django_db]

TASK = add.jobtype


@pytest.fixture(autouse=True)
def names():
    QueueFactory(name="billing")
    JobFactory(queue="billing", jobtype=TASK, jid="job-of-billing")
    WorkerFactory(wid="worker-one")
    entries.save(CronEntry(name="close the day", schedule="@daily", zone="UTC", jobtype="ring"), using="default")
    Limit.objects.create(scope="task", name=TASK, concurrency=1)


def state():
    return [
        list(Job.objects.order_by("pk").values_list("jid", "state", "queue")),
        list(Queue.objects.order_by("name").values_list("name", "paused_at")),
        list(Limit.objects.order_by("pk").values_list("name", "concurrency", "paused_at")),
        list(WorkerProcess.objects.values_list("state", flat=True)),
        list(CronEntry.objects.values_list("paused_at", flat=True)),
    ]


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (("pause", "biling"), 1, "did you mean billing?"),
        (("resume", "biling"), 1, "did you mean billing?"),
        (("clear", "biling", "--yes"), 1, "did you mean billing?"),
        (("limits", "set", "task", f"{TASK}x", "5"), 1, f"did you mean {TASK}?"),
        (("limits", "set", "queue", "biling", "5"), 1, "did you mean billing?"),
        (("limits", "pause", f"{TASK}x"), 1, f"did you mean {TASK}?"),
        (("limits", "resume", f"{TASK}x"), 1, f"did you mean {TASK}?"),
        (("limits", "remove", "task", f"{TASK}x"), 2, f"did you mean {TASK}?"),
        (("cron", "pause", "close the dai"), 2, "did you mean close the day?"),
        (("cron", "run", "close the dai"), 2, "did you mean close the day?"),
        (("cron", "next", "close the dai"), 2, "did you mean close the day?"),
        (("quiet", "worker-one", "worker-on", "--yes"), 2, "did you mean worker-one?"),
        (("terminate", "worker-on", "--yes"), 2, "did you mean worker-one?"),
        (("push", f"{TASK}x"), 1, f"did you mean {TASK}?"),
        (("push", TASK, "1", "2", "--queue", "biling"), 1, "did you mean billing?"),
        (("edit", "job-of-billing", "--queue", "biling"), 1, "did you mean billing?"),
        (("jobs", "queue:biling"), 0, "did you mean billing?"),
        (("discard", "queue:biling", "--yes"), 2, "did you mean billing?"),
        (("discard", "enqueued", f"task:{TASK}x", "--yes"), 2, f"did you mean {TASK}?"),
        (("retry", f"task:{TASK[:-1]}", "--dry-run"), 2, f"did you mean {TASK}?"),
        (("jobs", "state:ded"), 1, "got ded (did you mean dead?)"),
        (("discard", "ded", "--yes"), 1, "got ded (did you mean dead?)"),
        (("discard", "quue:billing", "--yes"), 1, "no such key: quue (did you mean queue?)"),
        (("discard", "succeded", "--yes"), 2, "no job has the ID succeded; did you mean succeeded?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_misspelt_name_changes_nothing_and_the_right_one_is_suggested(faktory, words, code, hint):
    before = state()
    answer = faktory(*words)
    assert (answer.code, hint in answer.err) == (code, True), answer
    assert state() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("faktory", "retyr", "dead"),
            "faktory: error: argument SUBCOMMAND: invalid choice: retyr; did you mean retry?",
        ),
        (
            ("faktory", "cron", "pasue", "x"),
            "faktory cron: error: argument verb: invalid choice: pasue; did you mean pause?",
        ),
        (("faktory", "discard", "dead", "--dryrun"), "unrecognized arguments: --dryrun; did you mean --dry-run?"),
        (("faktory", "discard", "dead", "--limt", "1"), "unrecognized arguments: --limt 1; did you mean --limit?"),
        (("faktory", "discard", "dead", "--Limit=1"), "unrecognized arguments: --Limit=1; did you mean --limit?"),
        (("faktory", "queues", "billing"), "faktory queues: error: unrecognized arguments: billing; see"),
        (
            ("runfaktory", "--noreload"),
            "runfaktory: error: unrecognized arguments: --noreload; did you mean --no-reload?",
        ),
        (("runfaktory", "--concurency=3"), "unrecognized arguments: --concurency=3; did you mean --concurrency?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_misspelt_option_or_subcommand_is_an_error_of_one_line_with_a_suggestion(words, message, capfd):
    """As from a shell, where argparse would print the whole usage."""
    with pytest.raises(SystemExit) as stop:
        ManagementUtility(["manage.py", *words]).execute()
    shown = capfd.readouterr()
    assert (stop.value.code, shown.out) == (1 if words[0] == "faktory" else 2, "")
    assert [message in line for line in shown.err.splitlines()] == [True]


def test_new_accepts_names_that_were_not_used_yet(faktory):
    assert faktory("limits", "set", "queue", "other", "5", "--new").code == 0
    assert faktory("edit", "job-of-billing", "--queue", "other", "--new").code == 0
    assert faktory("push", TASK, "1", "2", "--queue", "third", "--new").code == 0
    assert set(Job.objects.values_list("queue", flat=True)) == {"other", "third"}


@pytest.mark.parametrize("words", [("limits", "set", "task", "not imported", "5"), ("push", "not imported")])
def test_names_of_tasks_are_known_although_no_module_imported_them_yet(faktory, broken_app, monkeypatch, words):
    monkeypatch.setattr(base, "_registry", dict(base._registry))
    broken_app("from django_faktory import task\n\n@task(name='not imported')\ndef later():\n    pass\n")
    assert faktory(*words).code == 0


def test_a_limit_of_a_new_key_needs_no_known_name(faktory):
    assert faktory("limits", "set", "key", "customer:42", "5").code == 0


def test_a_limit_of_a_paused_queue_and_its_name_are_known(faktory):
    Queue.objects.create(name="paused", paused_at=timezone.now())
    assert faktory("limits", "set", "queue", "paused", "5").code == 0
