"""Addresses of the shop's pages."""

from django.urls import path

from . import views

app_name = "shop"
urlpatterns = [
    path("", views.home, name="home"),
    path("deliveries/", views.deliver_all, name="deliver"),
    path("partner/orders/", views.partner, name="partner"),
]
