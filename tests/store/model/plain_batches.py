"""Batches as sets of members without stored counters: the results that the store's counters must equal. Source: W26.

It does not import `batch_rules`, on purpose: a shared mistake would stay hidden.
"""

from dataclasses import dataclass, field

EXECUTED, DONE, DROPPED = "executed", "done", "dropped"


@dataclass
class Member:
    """One job of a batch. Its row may have been deleted."""

    way: str = ""
    """Empty until the job ran for the first time; then its outcome."""
    is_failed: bool = False

    @property
    def is_settled(self):
        return self.way in (DONE, DROPPED)


@dataclass
class PlainBatch:
    """A batch and the jids of its callbacks, "" for none. Progress has the values of the wire protocol."""

    bid: str
    parent: "PlainBatch | None"
    complete: str
    success: str
    ends_at: int | None
    """Time at which it expires."""
    members: list[Member] = field(default_factory=list)
    children: list["PlainBatch"] = field(default_factory=list)
    is_committed: bool = False
    reopened_until: int | None = None
    is_expired: bool = False
    is_broken: bool = False
    complete_st: str = ""
    success_st: str = ""
    given_up: set[str] = field(default_factory=set)
    """Kinds of callbacks that are dead, or deleted without success."""
    is_closed: bool = False
    """True if its parent counts it as executed."""
    has_reported_broken: bool = False
    over_at: int | None = None
    is_forgotten: bool = False

    @property
    def pending(self):
        return sum(not member.is_settled for member in self.members)

    @property
    def failed(self):
        return sum(member.is_failed for member in self.members)

    @property
    def has_fired(self):
        return bool((self.complete and self.complete_st) or (self.success and self.success_st))

    @property
    def all_executed(self):
        return all(member.way for member in self.members) and all(child.is_closed for child in self.children)

    @property
    def all_good(self):
        is_all_done = not self.pending and all(child.success_st == "2" for child in self.children)
        return is_all_done and not self.is_broken

    def ancestors(self):
        """Return the ancestors that count it as executed, the nearest first, up to one that waits for nothing."""
        found, below = [], self
        while below.is_closed and below.parent and not below.parent.is_forgotten and below.parent.over_at is None:
            found.append(below.parent)
            below = below.parent
        return found

    def descends_from(self, other):
        """Return True if `other` is above it in their tree."""
        if self.is_forgotten or self.parent is None:
            return False
        return self.parent is other or self.parent.descends_from(other)

    def touch(self, now):
        """Treat an OPEN as committed if its time is over; called before any change."""
        if self.reopened_until is not None and self.reopened_until <= now:
            self.reopened_until = None

    def reopen(self):
        """Withdraw the executed state: members are added, so all batches that relied on it wait again."""
        chain = [self, *self.ancestors()]
        for child in chain[:-1]:
            child.is_closed = False
        for one in chain:
            one.complete_st = ""
            one.is_closed = one.is_closed and one.parent is not None

    def status(self):
        """Return the values to compare with the row."""
        return (
            len(self.members), self.pending, sum(not member.way for member in self.members), self.failed,
            self.complete_st, self.success_st, self.is_broken, self.over_at is not None,
        )  # fmt: skip

    def settle(self, now, fire):
        """Take one step that is due, and return True if there was one."""
        has_changed = self._changes(now, fire)
        if has_changed and self.parent:
            self.parent.touch(now)
        return has_changed

    def _changes(self, now, fire):
        before = self.complete_st, self.success_st, self.is_closed, self.has_reported_broken, self.over_at
        if self.reopened_until is not None:
            return False
        if self.is_committed:
            if not self.complete_st and self.all_executed:
                self.complete_st = "1" if self.complete else "2"
                if self.complete:
                    fire(self, "complete")
            if not self.success_st and self.complete_st == "2" and self.all_good:
                self.success_st = "1" if self.success else "2"
                if self.success:
                    fire(self, "success")
        if self.is_committed or self.is_expired:
            self._close_or_mark_broken(now)
        return before != (self.complete_st, self.success_st, self.is_closed, self.has_reported_broken, self.over_at)

    def _close_or_mark_broken(self, now):
        if self.is_broken and not self.has_reported_broken:
            self.has_reported_broken = True
            if self.parent:
                self.parent.is_broken = True
        self.is_closed = self.is_closed or self._may_close()
        is_at_its_end = self.is_expired or self.success_st == "2"
        is_hopeless = self.is_broken and not self.pending and self.is_closed
        if self.over_at is None and (
            is_at_its_end or (is_hopeless and all(child.is_closed for child in self.children))
        ):
            self.over_at = now

    def _may_close(self):
        if self.is_expired or "complete" in self.given_up:
            return True
        if self.complete_st != "2":
            return False
        return self.success_st == "2" or "success" in self.given_up or not self.all_good
