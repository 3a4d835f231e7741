"""Views of the shop, and of the partner that its webhook calls."""

import json

from django.contrib import messages
from django.http import HttpResponseBadRequest, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_http_methods, require_POST

from django_faktory import Batch, UnknownBatch

from .forms import OrderForm
from .models import DailyReport, Delivery, Order, WebhookCall
from .orders import deliver, place_order


@require_http_methods(["GET", "HEAD", "POST"])
def home(request):
    """Show the order form and the latest orders."""
    form = OrderForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        order = place_order(**form.cleaned_data)
        messages.success(request, f"Thank you! This is {order}; the invoice is on its way.")
        return redirect("shop:home")
    orders = Order.objects.select_related("invoice")[:10]
    context = {
        "form": form,
        "orders": orders,
        "report": DailyReport.objects.last(),
        "to_deliver": Order.objects.filter(parcel=None).count(),
        "deliveries": [(delivery, _status(delivery)) for delivery in Delivery.objects.order_by("-pk")[:3]],
    }
    return render(request, "shop/home.html", context)


@require_POST
def deliver_all(request):
    """Create a delivery of all orders that have no parcel."""
    orders = list(Order.objects.filter(parcel=None)[:100])
    if orders:
        messages.success(request, f"This is {deliver(orders)}; it leaves when its parcels are closed.")
    return redirect("shop:home")


def _status(delivery):
    """Return the status of its batch, which is kept for a week after its end."""
    try:
        return Batch.find(delivery.bid).status()
    except UnknownBatch:
        return None


@csrf_exempt  # machines call it, without a session
@require_POST
def partner(request):
    """Simulate the partner's service. Reject the first call for each order, to show a retry."""
    try:
        order = Order.objects.get(pk=json.loads(request.body)["order"])
    except (ValueError, KeyError, TypeError, Order.DoesNotExist):
        return HttpResponseBadRequest('expected {"order": ID} of an order that exists')
    answer = 200 if WebhookCall.objects.filter(order=order).exists() else 503
    WebhookCall.objects.create(order=order, answer=answer)
    return JsonResponse({"order": order.pk}, status=answer)
