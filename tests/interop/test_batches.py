"""Batches by other projects' clients: PyPI's pyfaktory has verbs for them, npm's faktory-worker sends any command."""

import json
import subprocess

import pytest
from pyfaktory import Batch, Client, Job, Producer
from pyfaktory.models import TargetJob

from django_faktory.models import Batch as BatchRow
from django_faktory.models import Job as JobRow
from tests.interop.conftest import HERE
from tests.server.conftest import serve  # noqa: F401  (a fixture)
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.django_db(transaction=True)]


def test_npms_client_runs_the_child_batch_first_and_adds_only_from_inside(url, node_folder):
    """Run the example of the original server: a parent, a child, and a callback of each (W26)."""
    command = ["node", str(HERE / "node" / "batch.js"), url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    replies = json.loads(done.stdout.splitlines()[-1])
    assert replies.pop("outside").startswith("ERR batch BID: it is committed, so only one of its own jobs")
    ran = replies.pop("ran")
    assert sorted(ran[:-1]) == ["Added", "BarJob", "BatchJob", "BatchJob"]
    assert ran[-1] == "FooJob", "last of all"
    assert replies == {"opened": True, "callback": "success", "child": [True, 0, "2"]}


def test_a_batch_of_pyfaktory_enqueues_its_callback_and_then_rejects_open(url, start_worker):
    """Check the callback, and that BATCH OPEN is refused after it (W26)."""
    with Client(faktory_url=url, role="producer") as client:
        producer = Producer(client=client)
        callback = TargetJob(jobtype="add", args=[4, 5], queue="after")
        asked = Batch(parent_bid=None, description="of pyfaktory", success=callback, complete=None)
        bid = bid_in(producer.batch_new(asked))
        for _ in range(3):
            producer.push(Job(jobtype="add", args=[4, 5], custom={"bid": bid}))
        assert producer.batch_open(bid)
        assert producer.batch_commit(bid)
        start_worker("pyfaktory")
        wait_until(lambda: JobRow.objects.filter(queue="after").exists(), what="the callback")
        with pytest.raises(Exception, match=f"batch {bid}: a callback of it was enqueued already"):
            producer.batch_open(bid)
    row = BatchRow.objects.get()
    assert (row.bid, row.description, row.total, row.pending) == (bid, "of pyfaktory", 3, 0)
    assert json.loads(JobRow.objects.get().payload)["custom"] == {"_bid": bid, "_cb": "success"}


def bid_in(reply):
    """Return the bid in a reply: pyfaktory returns replies unparsed."""
    return reply.split("\r\n")[1] if reply.startswith("$") else reply
