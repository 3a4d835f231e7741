"""Model of turns at the periodic steps of maintenance. Changed only by `store.maintenance.turns`."""

from __future__ import annotations

from django.db import models

from .database import JobsModel
from .fields import ExactCharField


class MaintenanceTurn(JobsModel):
    """The next run of a periodic step, and the node that has the turn."""

    step = ExactCharField(max_length=60, primary_key=True)
    # Without an index: the table has a few dozen rows, and a change of no indexed column is cheaper (HOT).
    next_at = models.DateTimeField(help_text="When a node may take the turn; while one has it, the end of its lease.")
    runner = ExactCharField(max_length=255, default="", help_text="The node that took the latest turn.")
    ran_at = models.DateTimeField(null=True, help_text="End of the latest run.")
    took_s = models.FloatField(null=True, help_text="Seconds that the latest run took.")

    class Meta:
        # Internal rows without an admin page, so no permissions.
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.step} {self.next_at:%Y-%m-%d %H:%M:%S}"
