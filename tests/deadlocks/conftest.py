import threading

import pytest

from django_faktory.store import transactions


@pytest.fixture
def collisions(monkeypatch):
    """Record the transactions that were retried because of a deadlock: (thread, error)."""
    seen, real = [], transactions.kind_of

    def spy(error):
        if transactions.error_code(error) in ("40P01", 1213):
            seen.append((threading.current_thread().name, str(error)))
        return real(error)

    monkeypatch.setattr(transactions, "kind_of", spy)
    return seen
