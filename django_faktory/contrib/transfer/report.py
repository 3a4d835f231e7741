"""Count the jobs that a transfer found, moved and left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_REASONS = 20
"""Reasons listed one by one; further ones are counted together."""

MAX_JIDS = 5
"""Jids listed for each reason."""


@dataclass
class Counts:
    kind: str
    name: str
    found: int = 0
    moved: int = 0
    moved_before: int = 0
    """Jobs moved by an earlier, interrupted run."""

    @property
    def left(self) -> int:
        """Number of jobs that were not moved."""
        return self.found - self.moved - self.moved_before

    def as_json(self) -> dict[str, Any]:
        """Return the counts as a dict for JSON."""
        return asdict(self) | {"left": self.left}


@dataclass
class Report:
    """Counts and problems of a whole transfer."""

    layout: str
    is_dry: bool
    counts: list[Counts] = field(default_factory=list)
    paused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Remarks on data other than jobs, which is not moved."""
    _problems: dict[str, tuple[int, list[str]]] = field(default_factory=dict)

    def add_problem(self, reason: str, jids: Sequence[str] = (), *, count: int | None = None) -> None:
        """Record jobs that cannot be moved, or not safely; use `count` if their jids are unknown."""
        # One reason per job would make the report as long as the queue.
        if reason not in self._problems and len(self._problems) >= MAX_REASONS:
            reason = "other reasons"
        known_count, known_jids = self._problems.get(reason, (0, []))
        # Invalid entries have no jid.
        listed = [*known_jids, *filter(None, jids)][:MAX_JIDS]
        self._problems[reason] = (known_count + (len(jids) if count is None else count), listed)

    @property
    def found(self) -> int:
        """Number of jobs found."""
        return sum(counts.found for counts in self.counts)

    @property
    def moved(self) -> int:
        """Number of jobs moved, by this run or an earlier one."""
        return sum(counts.moved + counts.moved_before for counts in self.counts)

    @property
    def problems(self) -> list[dict[str, Any]]:
        """Reasons why jobs were left, the most frequent first."""
        # `sorted` is stable: reasons with equal counts stay in the order in which they occurred.
        ordered = sorted(self._problems.items(), key=lambda item: -item[1][0])
        return [{"reason": reason, "count": count, "jids": jids} for reason, (count, jids) in ordered]

    def as_json(self) -> dict[str, Any]:
        """Return the report as printed by `--json`."""
        return {
            "layout": self.layout,
            "dry_run": self.is_dry,
            "found": self.found,
            "moved": self.moved,
            "left": self.found - self.moved,
            "places": [counts.as_json() for counts in self.counts],
            "paused": self.paused,
            "problems": self.problems,
            "notes": self.notes,
        }
