"""Store orders and deliveries, and enqueue the jobs that follow from them."""

from datetime import timedelta

from django.db import transaction

from django_faktory import Batch

from . import tasks
from .models import Delivery, Order, Parcel


def place_order(*, customer, item, price):
    """Store an order and enqueue its jobs in one transaction."""
    with transaction.atomic():
        order = Order.objects.create(customer=customer, item=item, price=price)
        tasks.send_invoice.using(about=order).enqueue(order.pk)
        tasks.check_stock.using(about=order).enqueue(order.pk)
        tasks.call_webhook.using(about=order).enqueue(order.pk)
        tasks.ask_for_review.using(about=order, run_after=timedelta(minutes=1)).enqueue(order)
    return order


def deliver(orders):
    """Create a delivery with one parcel for each order, as nested batches: A inside B inside C.

    The jobs run in any order and concurrently. Callbacks of a nested batch run before those of its parent.
    Rows and batches are created in one transaction: if one order already has a parcel, nothing is stored.
    """
    with transaction.atomic():
        delivery = Delivery.objects.create()
        with Batch(description=str(delivery), success=tasks.send_off.callback(delivery.pk)) as batch:  # C, once
            for order in orders:
                _pack(Parcel.objects.create(delivery=delivery, order=order))
        delivery.bid = batch.bid
        delivery.save(update_fields=["bid"])
    return delivery


def _pack(parcel):
    with Batch(description=str(parcel), success=tasks.close_parcel.callback(parcel.pk)):  # B, for each parcel
        tasks.write_label.enqueue(parcel.pk)
        with Batch(description=f"goods of {parcel}", success=tasks.weigh.callback(parcel.pk)):  # A, before its B
            tasks.check_stock.enqueue(parcel.order_id)
            tasks.pick.enqueue(parcel.pk)
