"""Tasks of the shop. Each is idempotent, because a job may run twice, for example after a crash."""

import asyncio
import json
from datetime import datetime, timedelta
from decimal import Decimal
from urllib.error import URLError
from urllib.request import Request, urlopen

from django.conf import settings
from django.core.mail import send_mail
from django.db.models import Count, Sum
from django.urls import reverse
from django.utils import timezone

from django_faktory import Cron, Discard, TaskTimeout, task

from .models import DailyReport, Delivery, Invoice, Order, Parcel


class CardDeclined(Exception):
    """The bank has declined the card."""


def after_a_second(_exception, _task_result):
    """Retry after one second. The default backoff waits for 15 seconds or more before the first retry."""
    return 1


@task(queue_name="mail", priority=10, max_attempts=5)
def send_invoice(order_id):
    """Mail the invoice unless it was mailed before."""
    try:
        order = Order.objects.get(pk=order_id)
    except Order.DoesNotExist:
        raise Discard(f"order {order_id} is gone: nothing to pay") from None
    invoice, _ = Invoice.objects.get_or_create(order=order)
    if invoice.sent_at is None:
        send_mail(f"Your invoice {invoice.pk}", f"{order.item}: {order.price}", None, [order.customer])
        invoice.sent_at = timezone.now()
        invoice.save(update_fields=["sent_at"])
    return invoice.pk


@task
async def check_stock(order_id):
    """Ask the warehouse. While this task waits, other async tasks run in the same thread."""
    await asyncio.sleep(0.2)
    await Order.objects.filter(pk=order_id).aupdate(in_stock=True)


@task(max_attempts=5, retry_on=[URLError, TimeoutError, TaskTimeout], backoff=after_a_second, timeout=30, limit=8)
def call_webhook(order_id):
    """Report an order to the partner, and retry if the partner is unavailable.

    `limit=8`: at most eight of these jobs run at a time on all workers together.
    """
    url = settings.SHOP_URL + reverse("shop:partner")
    body = json.dumps({"order": order_id}).encode()
    request = Request(url, body, {"Content-Type": "application/json"})  # noqa: S310  (our own settings' address)
    with urlopen(request, timeout=10) as answer:  # noqa: S310
        return answer.status


@task(max_attempts=2, backoff=after_a_second)
def charge_card(order_id: int, card: str):
    """Charge the card. A card that ends in 0002 is always declined, so its job ends up dead."""
    if card.endswith("0002"):
        raise CardDeclined(f"order {order_id}: the bank declined card …{card[-4:]}")
    Order.objects.filter(pk=order_id, paid_at=None).update(paid_at=timezone.now())


@task(queue_name="mail", priority=-50, expires_in=86_400, missing="discard")
def ask_for_review(order):
    """Ask the customer for a review, some time after the order. The job expires if it is a day late.

    The job stores the key of the order, and the worker loads the row. If the row was deleted, the job is discarded.
    """
    send_mail("How do you like it?", f"You ordered {order.item}.", None, [order.customer])


@task
def pick(parcel_id):
    """Record when the goods were picked."""
    Parcel.objects.filter(pk=parcel_id, picked_at=None).update(picked_at=timezone.now())


@task
def write_label(parcel_id):
    """Write the address of the customer on the parcel."""
    parcel = Parcel.objects.select_related("order").get(pk=parcel_id)
    Parcel.objects.filter(pk=parcel_id).update(label=f"To {parcel.order.customer}")


@task
def weigh(parcel_id):
    """A: weigh the parcel. This is the callback of the batch that gets the goods, so the goods are there."""
    goods = Parcel.objects.select_related("order")
    parcel = goods.get(pk=parcel_id, picked_at__isnull=False, order__in_stock=True)
    parcel.grams = 100 + 900 * len(parcel.order.item)
    parcel.save(update_fields=["grams"])


@task
def close_parcel(parcel_id):
    """B: close the parcel, after A and when the label is written."""
    parcel = Parcel.objects.get(pk=parcel_id, grams__isnull=False, label__gt="")
    parcel.closed_at = parcel.closed_at or timezone.now()
    parcel.save(update_fields=["closed_at"])


@task(priority=20, takes_context=True)
def send_off(context, delivery_id):
    """C: send the delivery, after B of each parcel. A callback can read the status of its batch."""
    delivery = Delivery.objects.get(pk=delivery_id)
    if delivery.parcels.filter(closed_at=None).exists():
        raise RuntimeError(f"{delivery} of batch {context.batch.bid} has an open parcel: this must not happen")
    delivery.left_at = delivery.left_at or timezone.now()
    delivery.save(update_fields=["left_at"])
    return delivery.parcels.count()


@task(name="shop.daily_report", cron=Cron("5 0 * * *", zone="Europe/Berlin", overlap="skip"))
def daily_report(day=""):
    """Sum up one day, given as 2026-05-01, and return the number of its orders.

    Enqueued each night for the day before. If no node runs at that time, it is enqueued once when a node starts.
    """
    day = day or (timezone.localdate() - timedelta(days=1)).isoformat()
    begin = timezone.make_aware(datetime.fromisoformat(day))
    placed = Order.objects.filter(placed_at__gte=begin, placed_at__lt=begin + timedelta(days=1))
    found = placed.aggregate(orders=Count("pk"), total=Sum("price"))
    found["total"] = found["total"] or Decimal(0)
    DailyReport.objects.update_or_create(day=day, defaults=found)
    return found["orders"]
