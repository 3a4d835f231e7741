"""Models of limits and their limiters (ADR 0016). Only `store.limits` changes them."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext, gettext_noop, pgettext_lazy

from ..core.limits import Allowance, Scope, rate_text
from .database import JobsModel
from .fields import ExactCharField
from .indexes import IndexWhereSet
from .pausable import Pausable
from .permissions import LIMIT_PERMISSIONS

_SCOPES = [
    (str(Scope.QUEUE), pgettext_lazy("kind of a limit", "queue")),
    (str(Scope.TASK), pgettext_lazy("kind of a limit", "task")),
    (str(Scope.KEY), pgettext_lazy("kind of a limit", "key")),
]


class Limit(Pausable):
    """A limit for a queue, a task or a key: jobs that run concurrently, starts per period, or a pause.

    The numbers are kept during a pause, and apply again after it.
    """

    class Origin(models.TextChoices):
        """Source of the definition. An edit overrides code until it is reset."""

        CODE = "code", pgettext_lazy("origin of a definition", "Code")
        EDITED = "edited", pgettext_lazy("origin of a definition", "Edited")
        ADMIN = "admin", pgettext_lazy("origin of a definition", "Admin")

    scope = ExactCharField(max_length=10, choices=_SCOPES)
    name = ExactCharField(
        max_length=255,
        help_text="The queue, the task, or the key; for all keys with a prefix, the text before the colon.",
    )
    concurrency = models.IntegerField(
        null=True, blank=True, help_text="Maximum number of running jobs, on all workers."
    )
    rate = models.IntegerField(null=True, blank=True, help_text="Maximum number of starts in a period.")
    per = models.IntegerField(default=1, help_text="Length of the period in seconds.")
    burst = models.IntegerField(null=True, blank=True, help_text="Maximum number of starts at once after an idle time.")
    origin = ExactCharField(max_length=10, choices=Origin.choices, default=Origin.ADMIN)

    class Meta:
        permissions = LIMIT_PERMISSIONS
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["scope", "name"], name="faktory_limit_name"),
            models.CheckConstraint(name="faktory_limit_scope", condition=Q(scope__in=[str(scope) for scope in Scope])),
            models.CheckConstraint(
                name="faktory_limit_numbers",
                condition=(Q(concurrency__isnull=True) | Q(concurrency__gte=1))
                & (Q(rate__isnull=True) | Q(rate__gte=1))
                & (Q(burst__isnull=True) | Q(burst__gte=1))
                & Q(per__gte=1),
            ),
            models.CheckConstraint(
                # A row without numbers and without a pause would limit nothing.
                name="faktory_limit_limits",
                condition=Q(concurrency__isnull=False) | Q(rate__isnull=False) | Q(paused_at__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.get_scope_display()} {self.name}: {self.localized_allowance}"

    @property
    def removal_warning(self) -> str:
        """Warning that a deleted limit of code is created again, in English, marked for translation; else ""."""
        if self.origin == self.Origin.ADMIN:
            return ""
        return gettext_noop("It is defined in code, and returns when a node starts; remove it there.")

    @property
    def allowance(self) -> Allowance:
        """The allowance while the limit is not paused."""
        return Allowance(concurrency=self.concurrency, rate=self.rate, per=self.per, burst=self.burst)

    @property
    def localized_allowance(self) -> str:
        """The limit in words, in the active language."""
        at_a_time = rate = ""
        if self.concurrency is not None:
            at_a_time = gettext("%(number)s at a time") % {"number": self.concurrency}
        if self.rate is not None:
            rate = rate_text(self.rate, self.per)
        if rate and self.burst:
            rate = gettext("%(rate)s, %(number)s at once") % {"rate": rate, "number": self.burst}
        text = at_a_time or rate
        if at_a_time and rate:
            text = gettext("%(first)s and %(second)s") % {"first": at_a_time, "second": rate}
        if self.paused_at is None:
            return text
        return gettext("paused (normally %(allowance)s)") % {"allowance": text} if text else gettext("paused")

    @property
    def allowance_text(self) -> str:
        """The limit as text, in English."""
        allowed = str(self.allowance)
        return (f"paused, else {allowed}" if allowed else "paused") if self.paused_at else allowed


class Limiter(JobsModel):
    """A limiter: the state of a limit for one queue, one task, or one key in use.

    It repeats the limit's numbers: a transaction that has locked this row knows the current values.
    """

    limit = models.ForeignKey(Limit, on_delete=models.CASCADE, related_name="limiters")
    scope = ExactCharField(max_length=10, choices=_SCOPES)
    name = ExactCharField(max_length=255)
    concurrency = models.IntegerField(null=True)
    rate = models.IntegerField(null=True)
    per = models.IntegerField(default=1)
    burst = models.IntegerField(null=True)
    # A limiter that is paused gives no permits: its limit is paused, or its running jobs are not counted yet.
    is_paused = models.BooleanField(default=False)
    in_use = models.IntegerField(default=0, db_default=0, help_text="Running jobs that hold a permit.")
    # A token bucket: tokens are added by the database's clock when the row is read, so no timer is needed (ADR 0016).
    tokens = models.FloatField(default=0, db_default=0.0, help_text="Starts that the rate permits, as of `filled_at`.")
    filled_at = models.DateTimeField(db_default=Now())
    # While jobs wait, tokens are given at this time only, so that no job overtakes a waiting one (ADR 0016).
    opens_at = models.DateTimeField(null=True, help_text="Time at which the next blocked jobs are unblocked.")
    is_awaited = models.BooleanField(default=False, db_default=False, help_text="Whether it may block jobs.")

    class Meta:
        # Internal rows without an admin page, so no permissions.
        default_permissions = ()
        # Maintenance sleeps until the first of these; limiters that no job waits for have NULL.
        indexes: ClassVar = [IndexWhereSet(fields=["opens_at"], name="faktory_limiter_opens")]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["scope", "name"], name="faktory_limiter_name"),
            models.CheckConstraint(name="faktory_limiter_in_use", condition=Q(in_use__gte=0)),
        ]

    def __str__(self) -> str:
        return f"{self.get_scope_display()} {self.name}"
