"""Run the attacks at a small size: one connection, lines of 512 KiB. `make attacks` measures them at full size."""

import asyncio
import threading

import pytest
from django.db import connection

from django_faktory.brokers import tls
from django_faktory.models import Job, WorkerProcess
from tests.attacks.attackers import Attackers
from tests.attacks.inputs import ATTACKS, SMALL_LINE_BYTES
from tests.attacks.target import OPTIONS, GoodClient, Target
from tests.server.raw import CERTIFICATE

pytestmark = [pytest.mark.slow, pytest.mark.once]

SECONDS = 0.05


@pytest.fixture
def target(transactional_db, request):
    connection.close()
    target = Target(str(connection.settings_dict["NAME"]), request.param, MAX_COMMAND_BYTES=SMALL_LINE_BYTES)
    yield target
    target.close()
    print(target.program.text)


@pytest.mark.parametrize("target", OPTIONS, indirect=True)
def test_no_hostile_input_stops_the_server_or_loses_a_worker(target):
    good = GoodClient(target, tls.client_context(str(CERTIFICATE)))
    chosen = [attack for attack in ATTACKS if attack.server == target.kind]
    wrong = {str(attack): dict(attack_while_working(attack, target, good)) for attack in chosen}
    assert {name: replies for name, replies in wrong.items() if replies} == {}
    assert target.is_alive()
    assert Job.objects.get(jid=good.kept).wid == "good"
    assert WorkerProcess.objects.filter(wid="good").exists()
    good.end_kept()
    good.close()


def attack_while_working(attack, target, good):
    """Return replies that the attack does not expect; the good client works before, during and after it."""
    least_replies = int(attack.reads and attack.server != "tls")
    attackers = Attackers(
        attack, target.port, connections=1, size=attack.small, seconds=SECONDS, least_replies=least_replies
    )
    thread = threading.Thread(target=lambda: asyncio.run(attackers.run()))
    thread.start()
    good.work()
    while thread.is_alive():
        good.work()
        thread.join(0.02)
    good.work()
    if least_replies:
        assert attackers.replies, f"{attack}: no reply"
    return attackers.wrong
