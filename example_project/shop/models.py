"""Models of the shop: orders, and the rows that tasks create for them."""

from typing import ClassVar

from django.db import models


class Order(models.Model):
    """An order of a customer. `place_order` enqueues its tasks in the same transaction."""

    customer = models.EmailField()
    item = models.CharField(max_length=100)
    price = models.DecimalField(max_digits=8, decimal_places=2)
    in_stock = models.BooleanField(null=True, editable=False)
    paid_at = models.DateTimeField(null=True, editable=False)
    placed_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering: ClassVar = ["-placed_at", "-pk"]

    def __str__(self) -> str:
        return f"order {self.pk}: {self.item}"


class Invoice(models.Model):
    """The invoice of an order. One per order: a task that runs twice finds the first one."""

    order = models.OneToOneField(Order, on_delete=models.CASCADE)
    sent_at = models.DateTimeField(null=True, editable=False)

    def __str__(self) -> str:
        return f"invoice {self.pk} for {self.order}"


class WebhookCall(models.Model):
    """A call that the shop's partner received. The partner answers the first call for each order with 503."""

    order = models.ForeignKey(Order, on_delete=models.CASCADE)
    answer = models.PositiveSmallIntegerField()
    received_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"call about {self.order}: {self.answer}"


class Delivery(models.Model):
    """Parcels that leave together. Created in the same transaction as the batch that prepares them."""

    bid = models.CharField(max_length=255, editable=False)
    left_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        verbose_name_plural = "deliveries"

    def __str__(self) -> str:
        return f"delivery {self.pk}"


class Parcel(models.Model):
    """The parcel of one order. Batches keep its steps in order: picked, weighed, closed."""

    delivery = models.ForeignKey(Delivery, on_delete=models.CASCADE, related_name="parcels")
    order = models.OneToOneField(Order, on_delete=models.CASCADE)
    label = models.CharField(max_length=255, editable=False)
    picked_at = models.DateTimeField(null=True, editable=False)
    grams = models.PositiveIntegerField(null=True, editable=False)
    closed_at = models.DateTimeField(null=True, editable=False)

    def __str__(self) -> str:
        return f"parcel {self.pk} with {self.order}"


class DailyReport(models.Model):
    """Number and total of the orders of one day."""

    day = models.DateField(unique=True)
    orders = models.PositiveIntegerField()
    total = models.DecimalField(max_digits=12, decimal_places=2)

    def __str__(self) -> str:
        return f"{self.day}: {self.orders} orders, {self.total}"
