"""What the shop does when an order comes in."""

from datetime import timedelta

from django.db import transaction

from django_faktory import Batch

from . import tasks
from .models import Delivery, Order, Parcel


def place_order(*, customer, item, price):
    """Store an order and enqueue what follows from it: both happen, or neither does."""
    with transaction.atomic():
        order = Order.objects.create(customer=customer, item=item, price=price)
        tasks.send_invoice.using(about=order).enqueue(order.pk)
        tasks.check_stock.using(about=order).enqueue(order.pk)
        tasks.call_webhook.using(about=order).enqueue(order.pk)
        tasks.ask_for_review.using(about=order, run_after=timedelta(minutes=1)).enqueue(order)
    return order


def deliver(orders):
    """Make parcels of these orders, and a delivery of the parcels: A → B → C, one batch inside of the other.

    The jobs run in any order, and many at once; the callbacks of the inner batches come before those of the outer ones.
    Rows and batches are born together: an order that is in a parcel already leaves nothing of all this behind.
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
