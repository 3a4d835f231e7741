"""The broker contract over the wire: RemoteBroker → our server → OrmBroker → the test database."""

import pytest

from django_faktory.brokers.remote import RemoteBroker
from tests.contract.batch_contract import BatchContract
from tests.contract.broker_contract import BrokerContract
from tests.contract.management_contract import ManagementContract
from tests.server.conftest import serve  # noqa: F401  (a fixture)

pytestmark = pytest.mark.once


@pytest.mark.tuning(fetch_wait_s=0.5)  # no test needs a FETCH that waits for a job
class TestRemoteBroker(BatchContract, ManagementContract, BrokerContract):
    blocking = True

    @pytest.fixture
    def broker(self, serve):  # noqa: F811
        host, port = serve().address
        broker = RemoteBroker(f"tcp://{host}:{port}")
        yield broker
        broker.close()
