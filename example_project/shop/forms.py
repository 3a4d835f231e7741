"""The form that places an order."""

from typing import ClassVar

from django import forms

from .models import Order


class OrderForm(forms.ModelForm):
    class Meta:
        model = Order
        fields: ClassVar = ["customer", "item", "price"]
