"""The guide's programs in Node, run as they stand there; those in Go and Ruby are read by nobody here."""

import os
import re
import subprocess

import pytest

from django_faktory import tasks
from django_faktory.models import Job
from tests.docs.pages import DOCS, examples, text_of
from tests.interop.conftest import password, url  # noqa: F401  (fixtures)
from tests.server.conftest import serve  # noqa: F401  (a fixture)
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

WORKER, PRODUCER = re.findall(
    r"^```js\n(.*?)^```", text_of("howto", "other-languages.md"), flags=re.MULTILINE | re.DOTALL
)
FROM_QUICKSTART = re.search(r"^```js\n(.*?)^```", text_of("quickstart.md"), flags=re.MULTILINE | re.DOTALL)[1]


@pytest.fixture
def node(url, node_folder):  # noqa: F811
    """Runs a program; it is ended when the test is over."""
    started = []

    def run(code):
        environment = {**os.environ, "FAKTORY_URL": url, "NODE_PATH": str(node_folder / "node_modules")}
        started.append(
            subprocess.Popen(
                ["node", "-e", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=20)


def test_a_worker_in_node_runs_what_django_enqueued(node, monkeypatch):
    monkeypatch.setattr(tasks, "_registry", dict(tasks._registry))
    first, *_ = examples(DOCS / "howto" / "other-languages.md")
    names = {"__name__": "typed_in"}
    exec(first.code, names)
    process = node(WORKER)
    wait_until(lambda: Job.objects.get().state == "succeeded", 30, what="Node has done it")
    process.terminate()
    assert "thumbnail of 42" in process.communicate(timeout=20)[0]
    result = names["thumbnail"].get_result(Job.objects.get().jid)
    assert result.status.name == "SUCCESSFUL"


@pytest.mark.parametrize(
    ("code", "queue"),
    [(PRODUCER, "mail"), (f"(async () => {{{FROM_QUICKSTART}\nawait client.close();}})()", "default")],
    ids=["guide", "quickstart"],
)
def test_a_producer_in_node_pushes_what_a_task_takes(node, code, queue):
    process = node(code)
    told, _ = process.communicate(timeout=30)
    assert process.returncode == 0, told
    job = Job.objects.get()
    assert (job.jobtype, job.queue) == ("invoice.send", queue)
    assert '"args":[42]' in job.payload
