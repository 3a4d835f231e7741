"""Test that pages which update themselves use a bounded share of a core, however many are open."""

import heapq

import pytest
from django.urls import reverse

from django_faktory.admin import polling
from django_faktory.admin.polling import HEADER, PollBudget

PART = "admin:django_faktory_overview_part"


def simulate(watchers, *, every_s, cpu_s, seconds):
    """Return the CPU seconds per second of the second half, with pages that obey the factor."""
    budget = PollBudget(share=0.05)
    polls = [(number * every_s / watchers, number, 1.0) for number in range(watchers)]
    used = 0.0
    while polls[0][0] < seconds:
        now, number, factor = polls[0]
        factor = budget.record(cpu_s, now, factor)
        heapq.heapreplace(polls, (now + every_s * factor, number, factor))
        used += cpu_s * (now > seconds / 2)
    return used / (seconds / 2)


@pytest.mark.parametrize(("watchers", "cpu_s"), [(500, 0.015), (500, 0.1), (40, 0.05)])
def test_many_watchers_use_the_share_and_no_more(watchers, cpu_s):
    assert 0.03 < simulate(watchers, every_s=5, cpu_s=cpu_s, seconds=1800) < 0.06


def test_few_watchers_are_not_slowed_down():
    assert simulate(5, every_s=5, cpu_s=0.01, seconds=300) == pytest.approx(5 / 5 * 0.01, rel=0.1)


@pytest.mark.django_db
def test_only_polls_have_the_factor(admin_client, monkeypatch):
    monkeypatch.setattr(polling, "budget", PollBudget(share=1e-9))
    assert HEADER not in admin_client.get(reverse(PART)).headers
    answer = admin_client.get(reverse(PART), headers={"X-Requested-With": "fetch"})
    assert float(answer.headers[HEADER]) > 1


@pytest.mark.django_db
@pytest.mark.parametrize("text", ["nan", "-1", "1e9", "9" * 400, "٣"])
def test_any_other_text_of_a_client_counts_as_no_factor(admin_client, monkeypatch, text):
    monkeypatch.setattr(polling, "budget", PollBudget(share=1e9))
    headers = {"X-Requested-With": "fetch", HEADER: text}
    assert admin_client.get(reverse(PART), headers=headers).headers[HEADER] == "1.00"
