"""HTTP Basic logins: an address that sends wrong passwords is refused for the rest of the minute."""

import base64

import pytest
from django.contrib.auth.models import User
from django.test import override_settings
from rest_framework.settings import api_settings

from django_faktory.contrib.api import access

pytestmark = [pytest.mark.once, pytest.mark.django_db]

TRIES = 3
PATH = "/api/statistics/"


@pytest.fixture(autouse=True)
def basic_only(settings, monkeypatch):
    settings.FAKTORY = {"PASSWORD_TRIES": TRIES}
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    monkeypatch.setattr(access.PasswordThrottle, "timer", staticmethod(lambda: clock[0]))
    clock[0] = 1_000_000_020.0
    User.objects.create_superuser("operator", password="right")


clock = [0.0]
"""Current time in seconds; a new minute of the count starts at multiples of 60."""


def ask(client, password="wrong", name="operator", **more):
    word = base64.b64encode(f"{name}:{password}".encode()).decode()
    return client.get(PATH, headers={"authorization": f"Basic {word}"}, **more)


def test_too_many_wrong_passwords_block_the_right_password_too(client):
    statuses = [ask(client).status_code for _ in range(TRIES + 1)]
    assert statuses == [403] * TRIES + [429]
    answer = ask(client, "right")
    assert answer.status_code == 429
    assert answer.json()["type"].endswith(":too-many")
    assert 0 < int(answer["Retry-After"]) <= 60


def test_attempts_with_unknown_user_names_are_counted(client):
    assert [ask(client, name=f"unknown{one}").status_code for one in range(TRIES + 1)] == [403] * TRIES + [429]


def test_the_count_restarts_in_the_next_minute(client):
    for _ in range(TRIES + 1):
        ask(client)
    clock[0] += 60
    assert ask(client, "right").status_code == 200


def test_right_passwords_are_not_counted(client):
    assert {ask(client, "right").status_code for _ in range(TRIES * 2)} == {200}


def test_another_address_is_not_blocked(client):
    for _ in range(TRIES + 1):
        ask(client)
    assert ask(client, "right", REMOTE_ADDR="192.0.2.7").status_code == 200


def test_an_ipv6_network_counts_as_one_address(client):
    for host in range(TRIES):
        ask(client, REMOTE_ADDR=f"2001:db8::{host}")
    assert ask(client, "right", REMOTE_ADDR="2001:db8::ffff").status_code == 429
    assert ask(client, "right", REMOTE_ADDR="2001:db8:0:1::1").status_code == 200


def test_a_forged_forwarded_header_does_not_change_the_counted_address(client):
    for one in range(TRIES):
        ask(client, HTTP_X_FORWARDED_FOR=f"192.0.2.{one}")
    assert ask(client, "right", HTTP_X_FORWARDED_FOR="192.0.2.99").status_code == 429


def test_the_address_is_read_from_the_header_of_known_proxies(client, monkeypatch):
    monkeypatch.setattr(api_settings, "NUM_PROXIES", 1, raising=False)
    for _ in range(TRIES):
        ask(client, HTTP_X_FORWARDED_FOR="10.9.9.9, 192.0.2.1")
    assert ask(client, "right", HTTP_X_FORWARDED_FOR="192.0.2.1").status_code == 429
    assert ask(client, "right", HTTP_X_FORWARDED_FOR="192.0.2.2").status_code == 200
    assert ask(client, "right", HTTP_X_FORWARDED_FOR="\x7f not an address " * 40).status_code == 200


def test_existing_sessions_keep_working_while_logins_are_blocked(client):
    client.force_login(User.objects.get())
    for _ in range(TRIES + 1):
        ask(client.__class__())
    assert client.get(PATH).status_code == 200
    assert client.__class__().get(PATH).status_code == 403


def test_a_blocked_address_is_refused_by_the_browsable_api_too(client):
    for _ in range(TRIES):
        ask(client)
    word = base64.b64encode(b"operator:right").decode()
    page = client.get(PATH, headers={"authorization": f"Basic {word}", "accept": "text/html"})
    assert page.status_code == 429
    assert "operator" not in page.content.decode()


def test_zero_tries_means_no_limit(client):
    with override_settings(FAKTORY={"PASSWORD_TRIES": 0}):
        assert {ask(client).status_code for _ in range(TRIES * 3)} == {403}
