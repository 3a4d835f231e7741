"""Roll a version out beside another one, and back, under load; FAKTORY_DEPLOYS jobs end in each phase."""

import json
import os
from contextlib import closing

import pytest

from django_faktory.core.protocol.versions import semantic
from tests.server.raw import RawClient, push, worker
from tests.waiting import wait_until

JOBS = int(os.environ.get("FAKTORY_DEPLOYS", "40"))
PHASE_S = 60 + JOBS // 5

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + JOBS // 5)]


def hand_over(giver, taker):
    """Push a job to one server, then fetch it, send BEAT and end it at the other; return the replies."""
    jid = f"from-{giver[1]}-to-{taker[1]}"
    with closing(RawClient.identified(giver)) as pushes, closing(RawClient.identified(taker, **worker(jid))) as works:
        replies = [pushes.ask(push(jid=jid, queue="hand")), works.ask("BEAT " + json.dumps({"wid": jid}))]
        assert json.loads(works.ask("FETCH hand"))["jid"] == jid
        return [*replies, works.ask("ACK " + json.dumps({"jid": jid}))]


def version_of(address):
    """Return the package version that the server reports in INFO."""
    with closing(RawClient.identified(address)) as client:
        return json.loads(client.ask("INFO"))["server"]["faktory_version"]


def test_a_rollout_and_a_rollback_lose_no_job_and_block_no_client(rollout, two_versions):
    old, new = two_versions
    rollout.migrate(old)
    first = rollout.start(old)
    rollout.start_makers(1, "wire")
    rollout.start_takers(2, "wire")
    rollout.await_progress("end", JOBS, PHASE_S)

    second = rollout.start(new)
    both = {(giver.name, taker.name) for giver in two_versions for taker in two_versions}
    wait_until(lambda: rollout.crossings() >= both, 60, every_s=0.1, what="each version runs jobs of both")
    addresses = [rollout.address(first[0]), rollout.address(second[0])]
    assert [semantic(version_of(address)) for address in addresses] == [semantic(old.name), semantic(new.name)]
    assert hand_over(*addresses) == hand_over(*reversed(addresses)) == [b"+OK", b"+OK", b"+OK"]

    assert rollout.stop_all(*second) == [0, 0]
    rollout.start(old)
    rollout.await_progress("end", JOBS, PHASE_S)
    assert rollout.faults(rollout.verdict()) == {}
    assert rollout.all_alive()
