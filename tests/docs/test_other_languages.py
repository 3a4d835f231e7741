"""Run the guide's programs in Node, Go and Ruby unchanged."""

import os
import re
import subprocess

import pytest

from django_faktory.models import Job
from django_faktory.tasks import base
from tests import services
from tests.docs.pages import DOCS, examples, text_of
from tests.interop.conftest import password, url  # noqa: F401  (fixtures)
from tests.programs import WITH_US
from tests.server.conftest import serve  # noqa: F401  (a fixture)
from tests.waiting import wait_until

pytestmark = [pytest.mark.once, pytest.mark.django_db(transaction=True)]


def programs(language, *page):
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(*page), flags=re.MULTILINE | re.DOTALL)


WORKER, PRODUCER = programs("js", "howto", "other-languages.md")
(FROM_QUICKSTART,) = programs("js", "quickstart.md")


@pytest.fixture
def start(url):  # noqa: F811
    """Return a function that starts a program with FAKTORY_URL set; it is stopped after the test."""
    started = []

    def run(*command, **environment):
        environment = {**os.environ, "FAKTORY_URL": url, **environment}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen([*WITH_US, *command], env=environment, **pipes))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)


@pytest.fixture
def node(start, node_folder):
    return lambda code: start("node", "-e", code, NODE_PATH=str(node_folder / "node_modules"))


@pytest.fixture
def guides_task(monkeypatch):
    """Return a function that enqueues the guide's job and returns its task; some languages need another jobtype."""
    monkeypatch.setattr(base, "_registry", dict(base._registry))
    first, *_ = examples(DOCS / "howto" / "other-languages.md")

    def enqueue(jobtype="thumbnail"):
        names = {"__name__": "typed_in"}
        exec(first.code.replace('"thumbnail"', f'"{jobtype}"'), names)
        return names["thumbnail"]

    return enqueue


def works(process, task):
    """Wait until the program has processed the job, and check its output and the result in Django."""
    wait_until(lambda: Job.objects.get().state == "succeeded", what="success of the job")
    process.terminate()
    assert "thumbnail of 42" in process.communicate(timeout=60)[0]
    assert task.get_result(Job.objects.get().jid).status.name == "SUCCESSFUL"


def pushes(process, queue="mail"):
    """Check that the program exits with 0, and that a Django task can run the job it pushed."""
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    job = Job.objects.get()
    assert (job.jobtype, job.queue) == ("invoice.send", queue)
    assert '"args":[42]' in job.payload


def test_a_node_worker_runs_a_job_enqueued_by_django(node, guides_task):
    task = guides_task()
    works(node(WORKER), task)


@pytest.mark.parametrize(
    ("code", "queue"),
    [(PRODUCER, "mail"), (f"(async () => {{{FROM_QUICKSTART}}})()", "default")],
    ids=["guide", "quickstart"],
)
def test_a_node_producer_pushes_a_job_for_a_django_task(node, code, queue):
    pushes(node(code), queue)


@pytest.fixture
def built(go_folder, tmp_path):
    """Build the guide's programs in Go and return their folder."""
    for name, code in zip(("worker", "producer"), programs("go", "howto", "other-languages.md"), strict=True):
        (tmp_path / "guide" / name).mkdir(parents=True)
        (tmp_path / "guide" / name / "main.go").write_text(code)
    (tmp_path / "built").mkdir()
    services.build_go(tmp_path / "guide", tmp_path / "built")
    return tmp_path / "built"


def test_a_go_worker_runs_a_job_enqueued_by_django(start, built, guides_task):
    task = guides_task()
    works(start(str(built / "worker")), task)


def test_a_go_producer_pushes_a_job_for_a_django_task(start, built):
    pushes(start(str(built / "producer")))


@pytest.fixture
def in_ruby(ruby_folder, tmp_path):
    """Return the paths of the guide's programs in Ruby."""
    paths = tmp_path / "thumbnail.rb", tmp_path / "producer.rb"
    for path, code in zip(paths, programs("ruby", "howto", "other-languages.md"), strict=True):
        path.write_text(code)
    return paths


def test_a_ruby_worker_runs_a_job_enqueued_by_django(start, in_ruby, guides_task):
    task = guides_task("Thumbnail")
    works(start("faktory-worker", "-q", "thumbnails", "-r", str(in_ruby[0])), task)


def test_a_ruby_producer_pushes_a_job_for_a_django_task(start, in_ruby):
    pushes(start("ruby", str(in_ruby[1])))
