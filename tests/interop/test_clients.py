"""PyPI's pyfaktory and faktory, npm's faktory-worker, and the clients in Go and Ruby, each as producer and as worker.

One job succeeds, one fails and is retried, one dies. The clients are unmodified.
"""

import json
import os
import signal
import subprocess
from datetime import timedelta

import pytest
from django.test import override_settings
from django.utils import timezone
from faktory import Client as FaktoryClient
from faktory.exceptions import FaktoryAuthenticationError
from pyfaktory import Client, Job, Producer

from django_faktory.brokers.orm import OrmBroker
from django_faktory.models import Job as JobRow
from django_faktory.models import WorkerProcess
from django_faktory.store.maintenance import due
from django_faktory.store.statistics import counts
from django_faktory.store.store import Store
from tests.factories import payload
from tests.interop.conftest import FOLDERS, HERE
from tests.server.conftest import serve  # noqa: F401  (a fixture)
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.django_db(transaction=True)]

CLIENTS = ["pyfaktory", "faktory", "node", "go", "ruby"]
JOBTYPES = {"ruby": ("Add", "Fails")}


def push_by_pyfaktory(url, job):
    with Client(faktory_url=url, role="producer") as client:
        pushed = Job(**job)
        Producer(client=client).push(pushed)
        return pushed.jid


def push_by_faktory(url, job):
    given = {"task" if key == "jobtype" else key: value for key, value in job.items()}
    with FaktoryClient(faktory=url) as client:
        assert client.queue(**given, jid="from-the-third")
    return "from-the-third"


def push_by_program(*command, url):
    environment = {**os.environ, "FAKTORY_URL": url}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["total"] == 1
    return printed["jid"]


def processed():
    return counts.read(using="default").totals["processed"]


@pytest.fixture
def push(request):
    """Return a function that pushes a job with a client."""
    if request.param not in FOLDERS:
        return push_by_faktory if request.param == "faktory" else push_by_pyfaktory
    folder = request.getfixturevalue(FOLDERS[request.param])
    commands = {
        "node": lambda url: ["node", str(folder / "producer.js"), url],
        "go": lambda url: [str(folder / "producer")],
        "ruby": lambda url: ["ruby", str(folder / "producer.rb")],
    }
    return lambda url, job: push_by_program(*commands[request.param](url), json.dumps(job), url=url)


@pytest.mark.parametrize("password", ["secretword"])
def test_a_client_with_too_few_hash_iterations_gets_wrong_password(url):
    """Check that PyPI's faktory gets "wrong password" (W2)."""
    client = FaktoryClient(faktory=url)
    with pytest.raises(FaktoryAuthenticationError, match="wrong password"):
        client.connect()


@pytest.mark.parametrize(
    ("push", "password"),
    [*((client, "") for client in CLIENTS), *((client, "secretword") for client in CLIENTS if client != "faktory")],
    indirect=["push"],
)
@pytest.mark.parametrize(
    "job", [{"args": [4, 5]}, {"args": [], "queue": "mail", "retry": 3, "custom": {"a": {"b": 1}}}]
)
def test_a_job_pushed_by_another_client_is_stored_unchanged(url, push, job):
    jid = push(url, {"jobtype": "add"} | job)
    row = JobRow.objects.get()
    assert (row.jid, row.jobtype, row.queue) == (jid, "add", job.get("queue", "default"))
    stored = json.loads(row.payload)
    assert {key: stored[key] for key in job} == job


@pytest.mark.parametrize("kind", CLIENTS)
def test_another_clients_worker_acknowledges_retries_and_exhausts_a_job(url, start_worker, kind):
    broker = OrmBroker("default")
    add, fails = JOBTYPES.get(kind, ("add", "fails"))
    good = payload("good", add, [4, 5])
    flawed = payload("flawed", fails, ["no luck"], retry=1)
    broker.push([good, flawed])
    start_worker(kind)

    wait_until(lambda: not JobRow.objects.filter(jid=good.jid).exists(), what="the good job is done")
    wait_until(lambda: JobRow.objects.filter(jid=flawed.jid, state="retries").exists())
    row = JobRow.objects.get()
    assert "no luck" in json.loads(row.failure)["message"]
    assert WorkerProcess.objects.filter(wid=row.wid).exists()

    JobRow.objects.update(run_at=timezone.now() - timedelta(seconds=1))  # SQLite's clock has milliseconds only
    due.enqueue_due(Store())
    wait_until(lambda: JobRow.objects.filter(state="dead").exists(), what="the flawed job is dead")
    assert processed() == 3


def test_pushb_info_mutate_and_flush_work_with_npms_client(serve, node_folder):  # noqa: F811
    """Check PUSHB, INFO, MUTATE and FLUSH (W12, W22, W23, W25)."""
    with override_settings(FAKTORY={"ALLOW_FLUSH": True}):
        address = "tcp://{}:{}".format(*serve().address)
        command = ["node", str(HERE / "node" / "manager.js"), address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"rejected": 1, "enqueued": 4, "scheduled": 1, "dead": 1}
    assert not JobRow.objects.exists()


def test_npms_worker_leaves_no_working_job_after_sigterm(url, start_worker):
    """npm's worker ends and reports its job first. PyPI's faktory may leave one, which waits for W20 or its expiry.

    A job that is on its way to the worker when the signal arrives is another case: the worker may drop it.
    """
    OrmBroker("default").push([payload("last", "pauses")])
    process = start_worker("node")
    assert any(line == b"running\n" for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    wait_until(lambda: not JobRow.objects.exists())
    assert processed() == 1


@pytest.mark.parametrize("kind", ["pyfaktory", "faktory", "node"])
def test_another_clients_worker_obeys_a_terminate_order(url, start_worker, kind):
    """Check that it reads the reply to BEAT (W21). Workers that beat seldom are tested in `test_stopping`."""
    process = start_worker(kind)
    wid = wait_until(lambda: WorkerProcess.objects.filter(beat_at__isnull=False).first()).wid
    WorkerProcess.objects.filter(wid=wid).update(state="terminate")
    process.communicate(timeout=60)
