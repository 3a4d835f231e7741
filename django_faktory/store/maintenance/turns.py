"""Turns at the periodic steps of maintenance: one node at a time runs a step. ADR 0045.

Each step has a row with a lease. All times are the database's, so the clocks of the nodes may differ.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections.abc import Iterable, Set
from datetime import UTC, datetime, timedelta

from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from ...models import MaintenanceTurn
from ..transactions import read, run

LEASE_S = 120.0
"""Seconds after which a node that has not ended its step loses the turn: a step's longest transaction."""

LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
"""`next_at` of a turn that any node may take at once, whichever node goes first."""


class NodeTurns:
    """The turns of one node."""

    def __init__(self, steps: Iterable[str], *, using: str, lease_s: float = LEASE_S) -> None:
        self.steps = tuple(steps)
        self._using, self._lease_s = using, lease_s
        # The random part: a process that starts after this one may get its pid.
        self._runner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._held: dict[str, float] = {}  # when to extend each lease, by the monotonic clock

    @property
    def held(self) -> Set[str]:
        """Steps whose turn this node has, unless another node has taken it after the lease."""
        return self._held.keys()

    def add(self) -> None:
        """Add the rows that are missing; their steps are due at once."""
        rows = [MaintenanceTurn(step=step, next_at=LONG_AGO) for step in self.steps]
        turns = MaintenanceTurn.objects.using(self._using)
        run(self._using, lambda _: turns.bulk_create(rows, ignore_conflicts=True), atomic=False, writes=True)

    def find_due(self, *, overdue_s: float = 0.0) -> set[str]:
        """Return the steps that have been due for at least `overdue_s` and that no node runs."""
        due = self._rows(*self.steps).filter(next_at__lte=Now() - timedelta(seconds=overdue_s))
        return set(read(due.values_list("step", flat=True)))

    def take(self, step: str, *, lease_s: float | None = None) -> bool:
        """Take the turn if it is due, or extend the lease of this node; return whether this node has the turn.

        One statement, so of several nodes one succeeds. Sends none before half of the lease is over.
        """
        now = time.monotonic()
        if now < self._held.get(step, -math.inf):
            return True
        lease_s = lease_s or self._lease_s
        is_mine = Q(runner=self._runner) if step in self._held else Q(next_at__lte=Now())
        if _update(self._rows(step).filter(is_mine), next_at=Now() + timedelta(seconds=lease_s), runner=self._runner):
            self._held[step] = now + lease_s / 2
            return True
        self._held.pop(step, None)
        return False

    def finish(self, step: str, *, pause_s: float, took_s: float) -> None:
        """End the turn: the step is due again after `pause_s`. No effect if another node has taken the turn."""
        mine = self._rows(step).filter(runner=self._runner)
        _update(mine, next_at=Now() + timedelta(seconds=pause_s), ran_at=Now(), took_s=took_s)
        self._held.pop(step, None)

    def give_back(self) -> None:
        """Give back all turns, so that another node takes them at once."""
        if self._held:
            _update(self._rows(*self._held).filter(runner=self._runner), next_at=LONG_AGO)
            self._held.clear()

    def _rows(self, *steps: str) -> QuerySet[MaintenanceTurn]:
        return MaintenanceTurn.objects.using(self._using).filter(step__in=steps)


def forget_readings(*, using: str) -> None:
    """Delete the turns of queues that no node has read from their beginning for a day (`faktory_bounds_1`)."""
    old = MaintenanceTurn.objects.using(using).filter(step__startswith="read ", next_at__lt=Now() - timedelta(days=1))
    run(using, lambda _: old.delete(), atomic=False, writes=True)


def _update(rows: QuerySet[MaintenanceTurn], **values: object) -> int:
    return run(rows.db, lambda _: rows.update(**values), atomic=False, writes=True)
