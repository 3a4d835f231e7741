"""What the shop does when an order comes in."""

from datetime import timedelta

from django.db import transaction

from . import tasks
from .models import Order


def place_order(*, customer, item, price):
    """Store an order and enqueue what follows from it: both happen, or neither does."""
    with transaction.atomic():
        order = Order.objects.create(customer=customer, item=item, price=price)
        tasks.send_invoice.enqueue(order.pk)
        tasks.check_stock.enqueue(order.pk)
        tasks.call_webhook.enqueue(order.pk)
        tasks.ask_for_review.using(run_after=timedelta(minutes=1)).enqueue(order)
    return order
