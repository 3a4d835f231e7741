"""Register the shop's models in the admin. Its jobs are there under Faktory."""

from django.contrib import admin

from django_faktory.admin import JobsOfObjectMixin

from .models import DailyReport, Delivery, Invoice, Order, Parcel, WebhookCall


@admin.register(Order)
class OrderAdmin(JobsOfObjectMixin, admin.ModelAdmin):
    list_display = ("__str__", "customer", "price", "in_stock", "paid_at", "placed_at")


@admin.register(Invoice)
class InvoiceAdmin(admin.ModelAdmin):
    list_display = ("__str__", "sent_at")
    list_select_related = ("order",)


@admin.register(WebhookCall)
class WebhookCallAdmin(admin.ModelAdmin):
    list_display = ("__str__", "answer", "received_at")
    list_select_related = ("order",)


@admin.register(Delivery)
class DeliveryAdmin(admin.ModelAdmin):
    list_display = ("__str__", "left_at", "bid")


@admin.register(Parcel)
class ParcelAdmin(admin.ModelAdmin):
    list_display = ("__str__", "delivery", "picked_at", "grams", "closed_at")
    list_select_related = ("order", "delivery")


@admin.register(DailyReport)
class DailyReportAdmin(admin.ModelAdmin):
    list_display = ("day", "orders", "total")
