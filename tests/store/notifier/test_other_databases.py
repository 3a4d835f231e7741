"""Databases without hints: announcing does nothing, and listeners poll."""

import pytest

from django_faktory.store import notifier
from tests.settings import KIND
from tests.store.notifier.conftest import needs_notifications


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("queues", [["mail"], []])
def test_announcing_is_safe_on_every_database(queues):
    assert notifier.announce("default", queues) is None


@pytest.mark.skipif(KIND == "sqlite" or not needs_notifications.args[0], reason="about databases without hints")
def test_databases_without_hints_are_polled(closing_later):
    assert isinstance(closing_later(notifier.listen("default")), notifier.PollingListener)
