"""The shop in the admin; its jobs are there too, under Faktory."""

from django.contrib import admin

from .models import DailyReport, Invoice, Order, WebhookCall


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ("__str__", "customer", "price", "in_stock", "paid_at", "placed_at")


@admin.register(Invoice)
class InvoiceAdmin(admin.ModelAdmin):
    list_display = ("__str__", "sent_at")
    list_select_related = ("order",)


@admin.register(WebhookCall)
class WebhookCallAdmin(admin.ModelAdmin):
    list_display = ("__str__", "answer", "received_at")
    list_select_related = ("order",)


@admin.register(DailyReport)
class DailyReportAdmin(admin.ModelAdmin):
    list_display = ("day", "orders", "total")
