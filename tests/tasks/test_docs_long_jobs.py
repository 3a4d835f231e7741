"""Run the examples of docs/long-jobs.md: this module is built from the page's code blocks."""

import re
from datetime import timedelta
from pathlib import Path

import pytest

from django_faktory.models import Job
from django_faktory.testing import drain, interrupt_after
from example_project.shop.models import Order
from tests.project.tasks import returns

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "long-jobs.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)

charged, ready = [], []
page = {
    "__name__": __name__,
    "reserve": lambda order_id: f"place {order_id}",
    "charge": lambda order_id, idempotency_key: charged.append(order_id),
    "charged": charged,
    "send_receipt": returns,
    "mail_approvers": returns,
    "mail_customer": returns,
    "is_ready": lambda report_id: report_id in ready,
    "download": str,
    "find_price": len,
    "Order": Order,
}
exec(compile("\n\n".join(SNIPPETS), str(DOCUMENT), "exec"), page)


@pytest.fixture(autouse=True)
def _nothing_charged_yet():
    charged.clear()
    ready.clear()


def test_the_order_is_charged_once_although_its_worker_stops_after_each_step():
    page["test_an_order_is_charged_once"]()
    assert set(Job.objects.values_list("state", flat=True)) == {"succeeded"}


def test_the_rows_are_priced_once_although_the_worker_stops_after_each_chunk():
    Order.objects.bulk_create([Order(customer="", item="card", price=0) for _ in range(1200)])
    page["price_all"].enqueue()
    with interrupt_after("each"):
        assert [one.state for one in drain()] == ["enqueued"] * 3 + ["succeeded"]
    assert Order.objects.filter(price=4).count() == 1200


def test_the_lines_are_imported_once_although_the_worker_stops_after_each_chunk(tmp_path):
    (tmp_path / "orders.csv").write_text("a@example.org,card,1.50\n" * 1200)
    page["import_orders"].enqueue(str(tmp_path / "orders.csv"))
    with interrupt_after("each"):
        assert [one.state for one in drain()] == ["enqueued"] * 3 + ["succeeded"]
    assert Order.objects.count() == 1200


def test_the_order_is_approved_by_a_signal_and_charged_once():
    page["test_an_approved_order_is_charged"]()
    assert charged.count(8) == 1


def test_the_order_is_approved_by_the_view_and_expires_without_it():
    order = Order(customer="", item="card", price=1)
    order.job_id = page["process_order"].enqueue(9).id
    drain()
    page["approve"](order, "ann")
    result = page["process_order"].get_result(order.job_id)
    drain(until=timedelta(days=15))
    result.refresh()
    assert result.return_value == "approved by ann"
    late = page["process_order"].enqueue(10)
    assert [one.state for one in drain(until=timedelta(days=4)) if one.jid == late.id] == ["scheduled", "succeeded"]
    late.refresh()
    assert (late.return_value, 10 in charged) == ("nobody answered", False)


def test_the_report_is_collected_once_it_is_ready():
    job = page["collect_report"].enqueue(3)
    assert [one.state for one in drain(until=timedelta(minutes=11))] == ["scheduled"] * 3
    ready.append(3)
    assert [one.state for one in drain(until=timedelta(minutes=20))] == ["succeeded"]
    job.refresh()
    assert job.return_value == "3"
