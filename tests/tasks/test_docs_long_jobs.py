"""Run the examples of docs/long-jobs.md: this module is built from the page's code blocks."""

import re
from pathlib import Path

import pytest

from django_faktory.models import Job
from django_faktory.testing import drain, interrupt_after
from example_project.shop.models import Order
from tests.project.tasks import returns

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "long-jobs.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)

charged = []
page = {
    "__name__": __name__,
    "reserve": lambda order_id: f"place {order_id}",
    "charge": lambda order_id, idempotency_key: charged.append(order_id),
    "charged": charged,
    "send_receipt": returns,
    "find_price": len,
    "Order": Order,
}
exec(compile("\n\n".join(SNIPPETS), str(DOCUMENT), "exec"), page)


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
