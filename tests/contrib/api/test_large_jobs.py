"""A job of many small values is shown without parsing it, which would take seconds and many times its size."""

import tracemalloc

import pytest

from tests.factories import JobFactory
from tests.management.cli.conftest import faktory  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.once, pytest.mark.django_db]

ARGS = "[[" + ",".join(f'{{"a":{number},"b":[1.5]}}' for number in range(200_000)) + "]]"


@pytest.fixture
def job():
    return JobFactory(dead=True, jid="job-large-1", payload=f'{{"jid":"job-large-1","args":{ARGS}}}', result=ARGS)


def memory_of(call):
    """Return what the call returns, and its peak of memory in multiples of the job's two texts."""
    tracemalloc.start()
    try:
        answer = call()
        return answer, tracemalloc.get_traced_memory()[1] / (2 * len(ARGS))
    finally:
        tracemalloc.stop()


def test_the_api_returns_all_of_a_large_job_with_a_few_copies_of_its_text(as_root, job, client):
    as_root("GET", "jobs/")
    answer, copies = memory_of(lambda: client.get(f"/api/jobs/{job.jid}/"))
    assert f'"args":{ARGS}' in answer.content.decode()
    assert copies < 6


def test_the_page_of_a_browser_shows_the_beginning_of_a_large_job(as_root, job, client):
    as_root("GET", "jobs/")
    answer, copies = memory_of(lambda: client.get(f"/api/jobs/{job.jid}/", headers={"Accept": "text/html"}))
    assert f"{len(ARGS):,} characters; ?format=json has all" in answer.content.decode()
    assert len(answer.content) < 100_000
    assert copies < 6


def test_the_page_of_a_browser_shows_a_small_job_indented(as_root, client):
    JobFactory(dead=True, jid="job-small-1", payload='{"jid":"job-small-1","args":[1]}')
    as_root("GET", "jobs/")
    content = client.get("/api/jobs/job-small-1/", headers={"Accept": "text/html"}).content.decode()
    assert "        &quot;args&quot;: [\n            1\n        ]" in content


def test_the_command_line_prints_all_of_a_large_job_as_json_and_its_beginning_for_people(faktory, job):  # noqa: F811
    answer, copies = memory_of(lambda: faktory("job", job.jid, "--json"))
    assert f'"args":{ARGS}' in answer.out
    assert copies < 8
    answer, copies = memory_of(lambda: faktory("job", job.jid))
    assert f"({len(ARGS):,} characters; --json prints all)" in answer.out
    assert len(answer.out) < 100_000
    assert copies < 6
