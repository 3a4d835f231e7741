import threading

import pytest

from django_faktory.store import transactions


@pytest.fixture
def collisions(monkeypatch):
    """Record the transactions that were retried because of a deadlock: (thread, error)."""
    seen, real = [], transactions.is_collision

    def spy(error):
        if transactions.error_code(error) in ("40P01", 1213):
            seen.append((threading.current_thread().name, str(error)))
        return real(error)

    monkeypatch.setattr(transactions, "is_collision", spy)
    return seen
