"""The shop's page, and the partner that its webhook calls."""

import json

from django.contrib import messages
from django.http import HttpResponseBadRequest, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_http_methods, require_POST

from .forms import OrderForm
from .models import DailyReport, Order, WebhookCall
from .orders import place_order


@require_http_methods(["GET", "HEAD", "POST"])
def home(request):
    """The form, and the latest orders."""
    form = OrderForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        order = place_order(**form.cleaned_data)
        messages.success(request, f"Thank you! This is {order}; the invoice is on its way.")
        return redirect("shop:home")
    orders = Order.objects.select_related("invoice")[:10]
    return render(request, "shop/home.html", {"form": form, "orders": orders, "report": DailyReport.objects.last()})


@csrf_exempt  # machines call it, without a session
@require_POST
def partner(request):
    """Stands for somebody else's service: refuses the first call about each order, so that a retry can be seen."""
    try:
        order = Order.objects.get(pk=json.loads(request.body)["order"])
    except (ValueError, KeyError, TypeError, Order.DoesNotExist):
        return HttpResponseBadRequest('expected {"order": ID} of an order that exists')
    answer = 200 if WebhookCall.objects.filter(order=order).exists() else 503
    WebhookCall.objects.create(order=order, answer=answer)
    return JsonResponse({"order": order.pk}, status=answer)
