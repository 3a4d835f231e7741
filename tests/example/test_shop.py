"""Test the example project: its tasks work, and running one twice does no harm."""

from datetime import date, timedelta
from decimal import Decimal
from urllib.error import HTTPError

import pytest
from asgiref.sync import async_to_sync
from django.core import mail
from django.db import IntegrityError, transaction
from django.utils import timezone

from django_faktory import Discard
from django_faktory.models import Batch, Job
from django_faktory.testing import drain
from example_project.shop import tasks
from example_project.shop.models import DailyReport, Delivery, Invoice, Order, Parcel, WebhookCall
from example_project.shop.orders import deliver, place_order

pytestmark = [pytest.mark.once, pytest.mark.django_db, pytest.mark.urls("example_project.urls")]

ENGINE = {"customer": "ada@example.org", "item": "Analytical Engine", "price": "1843.00"}


@pytest.fixture
def order():
    return Order.objects.create(**ENGINE)


def test_an_order_enqueues_its_jobs(client):
    answer = client.post("/", ENGINE, follow=True)
    assert "the invoice is on its way" in answer.content.decode()
    states = {job.jobtype.rpartition(".")[2]: job.state for job in Job.objects.all()}
    assert states == {
        "send_invoice": "enqueued",
        "check_stock": "enqueued",
        "call_webhook": "enqueued",
        "ask_for_review": "scheduled",
    }


def test_a_rolled_back_order_leaves_no_jobs():
    with transaction.atomic():
        place_order(**ENGINE)
        assert Job.objects.exists()
        transaction.set_rollback(True)
    assert not Order.objects.exists()
    assert not Job.objects.exists()


def test_an_invalid_order_is_shown_again_and_enqueues_nothing(client):
    answer = client.post("/", ENGINE | {"customer": "nobody"})
    assert "valid email" in answer.content.decode()
    assert not Job.objects.exists()


def test_an_invoice_is_mailed_once(order):
    assert tasks.send_invoice.func(order.pk) == tasks.send_invoice.func(order.pk)
    assert Invoice.objects.get().sent_at
    assert [message.to for message in mail.outbox] == [["ada@example.org"]]


def test_an_invoice_for_a_missing_order_is_discarded():
    with pytest.raises(Discard, match="order 404 is gone"):
        tasks.send_invoice.func(404)


@pytest.mark.django_db(transaction=True)
def test_the_partner_rejects_an_order_once_and_then_accepts_it(order, live_server, settings):
    settings.SHOP_URL = live_server.url
    with pytest.raises(HTTPError, match="503") as refused:
        tasks.call_webhook.func(order.pk)
    refused.value.close()
    assert tasks.call_webhook.func(order.pk) == 200
    assert list(WebhookCall.objects.order_by("pk").values_list("answer", flat=True)) == [503, 200]


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"order": 404}', '{"order": "x"}', '{"order": null}'])
def test_the_partner_rejects_an_invalid_body_with_a_reason(client, body):
    answer = client.post("/partner/orders/", body, content_type="application/json")
    assert answer.status_code == 400
    assert "expected" in answer.content.decode()


def test_check_stock_marks_the_order_as_in_stock(order):
    async_to_sync(tasks.check_stock.func)(order.pk)
    order.refresh_from_db()
    assert order.in_stock is True


def test_a_card_is_charged_once(order):
    tasks.charge_card.func(order.pk, "4242424242424242")
    first = Order.objects.get().paid_at
    tasks.charge_card.func(order.pk, "4242424242424242")
    assert Order.objects.get().paid_at == first is not None


def test_a_declined_card_error_shows_only_the_last_digits(order):
    with pytest.raises(tasks.CardDeclined) as declined:
        tasks.charge_card.func(order.pk, "4000000000000002")
    assert "…0002" in str(declined.value)
    assert "40000" not in str(declined.value)


def test_the_declined_card_of_a_dead_job_is_replaced_in_the_admin_as_it_is_typed(order, admin_client):
    tasks.charge_card.enqueue(order.pk, "4000000000000002")
    drain(until=timedelta(seconds=5))
    job = Job.objects.get(state="dead")
    typed = {"arg-order_id": order.pk, "arg-card": "4242424242424242"}
    assert admin_client.post(f"/admin/django_faktory/job/{job.pk}/edit/", typed).status_code == 302
    Job.objects.dead().retry()
    drain()
    order.refresh_from_db()
    assert order.paid_at


def test_a_repeated_daily_report_replaces_the_earlier_one(order):
    day = timezone.localdate(order.placed_at).isoformat()
    assert tasks.daily_report.func(day) == 1
    Order.objects.create(**ENGINE)
    assert tasks.daily_report.func(day) == 2
    report = DailyReport.objects.get()
    assert (report.day, report.total) == (date.fromisoformat(day), Decimal("3686.00"))


def test_a_day_without_orders_also_has_a_report():
    assert tasks.daily_report.func("2026-05-01") == 0
    assert DailyReport.objects.get().total == 0


def test_the_page_shows_orders_and_the_report(client, order):
    tasks.daily_report.func(timezone.localdate().isoformat())
    page = client.get("/").content.decode()
    assert "Analytical Engine" in page
    assert "1 orders" in page


def test_ask_for_review_mails_the_customer(order):
    tasks.ask_for_review.func(order)
    assert "Analytical Engine" in mail.outbox[0].body


def test_a_delivery_has_three_batch_levels_and_runs_its_steps_in_order(client):
    orders = [Order.objects.create(**ENGINE) for _ in range(3)]
    delivery = deliver(orders)
    assert list(Batch.objects.order_by("pk").values_list("depth", flat=True)) == [0, 1, 2, 1, 2, 1, 2]
    ran = [one.jobtype.rpartition(".")[2] for one in drain(raise_errors=True)]
    assert sorted(ran[:9]) == ["check_stock"] * 3 + ["pick"] * 3 + ["write_label"] * 3
    callbacks = ran[9:]
    assert sorted(callbacks) == ["close_parcel"] * 3 + ["send_off"] + ["weigh"] * 3
    assert callbacks[0] == "weigh"
    assert callbacks[-1] == "send_off"
    delivery.refresh_from_db()
    assert delivery.left_at
    assert list(Parcel.objects.values_list("grams", flat=True)) == [100 + 900 * 17] * 3
    assert set(Batch.objects.values_list("success_st", flat=True)) == {"2"}
    assert "delivery" in client.get("/").content.decode()


def test_a_failed_delivery_leaves_no_row_batch_or_job(order):
    deliver([order])
    counts = [model.objects.count() for model in (Delivery, Parcel, Batch, Job)]
    with pytest.raises(IntegrityError):
        deliver([Order.objects.create(**ENGINE), order])
    assert [model.objects.count() for model in (Delivery, Parcel, Batch, Job)] == counts


def test_the_shop_delivers_every_order_once(client, order):
    for _ in range(2):
        page = client.post("/deliveries/", follow=True).content.decode()
    assert "its parcels are being packed" in page
    assert Parcel.objects.get().order == order
    drain()
    assert "left at" in client.get("/").content.decode()


def test_the_shop_page_reports_a_delivery_that_cannot_leave(client, order):
    deliver([order])
    Batch.objects.update(is_broken=True)
    assert "a job was given up, it cannot leave" in client.get("/").content.decode()
    Batch.objects.all().delete()
    assert "its parcels are being packed" in client.get("/").content.decode()
