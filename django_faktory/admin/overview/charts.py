"""Compute stacked bar charts for an SVG template: numbers in, coordinates out. Pure.

Without a library, a script or colours: the template and its stylesheet draw the bars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# In units of the viewBox, which the template stretches to the width of the page.
HEIGHT = 100.0
STEP, GAP = 10.0, 2.0


class Point(NamedTuple):
    """Jobs that succeeded and failed in one interval."""

    label: str
    succeeded: int
    failed: int


class Bar(NamedTuple):
    """Coordinates of one interval's bar: failures at the bottom, successes above."""

    x: str
    width: str
    succeeded_y: str
    succeeded_height: str
    failed_y: str
    failed_height: str
    title: str


class Chart(NamedTuple):
    """Values needed by the chart template."""

    title: str
    summary: str
    bars: tuple[Bar, ...]
    width: str
    height: str
    maximum: int
    first_label: str
    last_label: str
    points: tuple[Point, ...]
    """Intervals in which a job ended, for the table that repeats the chart as text."""


def build_chart(title: str, points: Sequence[Point]) -> Chart:
    """Return a chart with bars scaled to the highest one."""
    maximum = max((point.succeeded + point.failed for point in points), default=0)
    scale = HEIGHT / maximum if maximum else 0.0
    bars = tuple(_build_bar(index, point, scale) for index, point in enumerate(points))
    succeeded, failed = sum(point.succeeded for point in points), sum(point.failed for point in points)
    return Chart(
        title=title,
        summary=f"{title}: {succeeded:,} succeeded, {failed:,} failed",
        bars=bars,
        width=_format_number(len(points) * STEP),
        height=_format_number(HEIGHT),
        maximum=maximum,
        first_label=points[0].label if points else "",
        last_label=points[-1].label if points else "",
        points=tuple(point for point in points if point.succeeded or point.failed),
    )


def _build_bar(index: int, point: Point, scale: float) -> Bar:
    failed, succeeded = point.failed * scale, point.succeeded * scale
    return Bar(
        x=_format_number(index * STEP + GAP / 2),
        width=_format_number(STEP - GAP),
        succeeded_y=_format_number(HEIGHT - failed - succeeded),
        succeeded_height=_format_number(succeeded),
        failed_y=_format_number(HEIGHT - failed),
        failed_height=_format_number(failed),
        title=f"{point.label}: {point.succeeded:,} succeeded, {point.failed:,} failed",
    )


def _format_number(number: float) -> str:
    """Return the number as text, so that no template formats it with a local decimal comma."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
