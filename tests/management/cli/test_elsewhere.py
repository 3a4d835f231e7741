"""Test `manage.py faktory` with jobs on a remote Faktory server: what the protocol supports, and what it does not."""

import pytest

from django_faktory import brokers
from django_faktory.models import Job, Queue
from tests.factories import JobFactory, QueueFactory
from tests.management.cli.test_subcommands import states
from tests.project.tasks import add
from tests.server.conftest import serve  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.once, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def elsewhere(serve, settings, monkeypatch):  # noqa: F811
    """Start a server over the test's database; this project knows only its address."""
    host, port = serve().address
    monkeypatch.setenv("FAKTORY_URL", f"tcp://{host}:{port}")
    settings.FAKTORY = {"BROKER": "remote", "OUTBOX": []}
    yield
    brokers.get_broker().close()


@pytest.mark.usefixtures("elsewhere")
def test_info_queues_and_top_work_with_a_remote_server(asked):
    QueueFactory(name="mail")
    JobFactory(queue="mail")
    assert asked("info")["queues"] == {"mail": 1}
    [queue] = asked("queues")["queues"]
    assert (queue["name"], queue["size"], queue["is_paused"]) == ("mail", 1, None)
    shown = asked("top", "--once")
    assert (shown["workers"], shown["working"], shown["sets"]) == (None, None, {"dead": 0} | shown["sets"])
    assert asked("workers") == {"workers": None, "count": 0}


@pytest.mark.usefixtures("elsewhere")
def test_push_and_job_state_work_with_a_remote_server(asked):
    jid = asked("push", add.jobtype, "1", "2")["jid"]
    assert Job.objects.get(jid=jid).state == "enqueued"
    assert asked("job", jid)["state"] == "enqueued"
    assert asked("job", "nosuchjob", code=2)["state"] == "unknown"


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        (("retry", "dead"), "enqueued"),
        (("retry", "task:noop"), "enqueued"),
        (("requeue", "dead", "task:noop"), "enqueued"),
        (("kill", "dead", "--yes"), "dead"),
        (("discard", "jid-of-one", "--yes"), None),
    ],
)
def test_job_sets_are_changed_as_far_as_mutate_supports_the_query(asked, words, becomes):
    JobFactory(dead=True, jid="jid-of-one", jobtype="noop")
    other = JobFactory(working=True, jobtype="noop")
    assert asked(*words) == {"query": asked(*words)["query"], "found": None, "changed": None, "dry_run": False}
    assert (states().get("jid-of-one"), states()[other.jid]) == (becomes, "working")


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    "words",
    [
        ("retry", "dead", "queue:mail"),
        ("retry", "scheduled"),
        ("kill", "enqueued", "--yes"),
        ("discard", "task:shop.*", "--yes"),
        ("discard", "task:a,b", "--yes"),
        ("prune", "dead", "--yes"),
        ("cancel", "scheduled", "--yes"),
        ("prune",),
        ("retry", "dead", "--limit", 1),
        ("retry", "dead", "--dry-run"),
        ("jobs", "dead"),
        ("batches",),
        ("quiet", "--all", "--yes"),
    ],
)
def test_commands_the_protocol_cannot_express_are_rejected_without_changes(faktory, words):
    JobFactory(dead=True, jobtype="a")
    answer = faktory(*words)
    assert (answer.code, answer.out, len(answer.err.splitlines())) == (1, "", 1)
    assert set(states().values()) == {"dead"}


@pytest.mark.usefixtures("elsewhere")
def test_queues_of_a_remote_server_are_paused_and_resumed(asked):
    QueueFactory(name="mail")
    assert asked("pause", "mail") == {"queues": ["mail"]}
    assert Queue.objects.paused().count() == 1
    assert asked("resume", "--all") == {"queues": ["mail"]}
    assert Queue.objects.paused().count() == 0


def test_an_unreachable_server_exits_with_3(faktory, settings, monkeypatch):
    monkeypatch.setenv("FAKTORY_URL", "tcp://127.0.0.1:1")
    settings.FAKTORY = {"BROKER": "remote", "OUTBOX": []}
    answer = faktory("info")
    assert (answer.code, answer.out, len(answer.err.splitlines())) == (3, "", 1)
