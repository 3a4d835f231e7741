"""Abstract model of rows that people and programs pause: since when, by which of them, and why."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext

from .database import JobsModel


class Pausable(JobsModel):
    """A row with a pause. `store.queues.pause_columns` builds the two texts."""

    paused_at = models.DateTimeField(null=True, blank=True, help_text="While it is set, no job starts.")
    paused_by = models.CharField(max_length=255, default="", db_default="", help_text="The user or program.")
    pause_reason = models.CharField(max_length=500, default="", db_default="", help_text="Why it is paused.")

    class Meta:
        abstract = True

    @property
    def pause_note(self) -> str:
        """Who paused it and why, in the active language; "" if neither is known."""
        if not self.pause_reason:
            return gettext("by %(by)s") % {"by": self.paused_by} if self.paused_by else ""
        return gettext("by %(by)s: %(reason)s") % {"by": self.paused_by or "–", "reason": self.pause_reason}
