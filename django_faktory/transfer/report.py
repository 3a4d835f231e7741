"""What a transfer found, moved and left, counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_REASONS = 20
"""Different reasons that are told one by one; the rest is counted together."""

MOST_JIDS = 5


@dataclass
class Counts:
    """Of one queue or set."""

    kind: str
    name: str
    found: int = 0
    moved: int = 0
    before: int = 0
    """Had been moved by a run that broke off."""

    @property
    def left(self) -> int:
        """Are where they were."""
        return self.found - self.moved - self.before

    def as_json(self) -> dict[str, Any]:
        """Its row."""
        return {
            "kind": self.kind,
            "name": self.name,
            "found": self.found,
            "moved": self.moved,
            "moved_before": self.before,
            "left": self.left,
        }


@dataclass
class Report:
    """Of a whole transfer."""

    layout: str
    is_dry: bool
    counts: list[Counts] = field(default_factory=list)
    paused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is there beside jobs, and is left."""
    _problems: dict[str, tuple[int, list[str]]] = field(default_factory=dict)

    def problem(self, reason: str, jids: Sequence[str] = (), *, count: int | None = None) -> None:
        """These jobs cannot be moved, or not surely; `count` where their jids are not known."""
        if reason not in self._problems and len(self._problems) >= MOST_REASONS:
            reason = "other reasons"
        known, some = self._problems.get(reason, (0, []))
        told = [*some, *filter(None, jids)][:MOST_JIDS]
        self._problems[reason] = (known + (len(jids) if count is None else count), told)

    @property
    def found(self) -> int:
        """Jobs that were there."""
        return sum(one.found for one in self.counts)

    @property
    def moved(self) -> int:
        """Jobs that are there no more, by this run or one before it."""
        return sum(one.moved + one.before for one in self.counts)

    @property
    def problems(self) -> list[dict[str, Any]]:
        """Why jobs were left, the most frequent first."""
        ordered = sorted(self._problems.items(), key=lambda one: -one[1][0])
        return [{"reason": reason, "count": count, "jids": jids} for reason, (count, jids) in ordered]

    def as_json(self) -> dict[str, Any]:
        """The document of `--json`."""
        return {
            "layout": self.layout,
            "dry_run": self.is_dry,
            "found": self.found,
            "moved": self.moved,
            "left": self.found - self.moved,
            "places": [one.as_json() for one in self.counts],
            "paused": self.paused,
            "problems": self.problems,
            "notes": self.notes,
        }
