"""Compute stacked bar charts for an SVG template: numbers in, coordinates out. Pure.

Without a library, a script or colours: the template and its stylesheet draw the bars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

HEIGHT = 100.0
STEP, GAP = 10.0, 2.0


class Point(NamedTuple):
    """Jobs that succeeded and failed in one interval."""

    label: str
    well: int
    badly: int


class Bar(NamedTuple):
    """Coordinates of one interval's bar: failures at the bottom, successes above."""

    x: str
    width: str
    well_y: str
    well_height: str
    badly_y: str
    badly_height: str
    title: str


class Chart(NamedTuple):
    """Values needed by the chart template."""

    title: str
    summary: str
    bars: tuple[Bar, ...]
    width: str
    height: str
    maximum: int
    first: str
    last: str
    points: tuple[Point, ...]
    """Intervals in which a job ended, for the table that repeats the chart as text."""


def chart(title: str, points: Sequence[Point]) -> Chart:
    """Return a chart with bars scaled to the highest one."""
    maximum = max((point.well + point.badly for point in points), default=0)
    scale = HEIGHT / maximum if maximum else 0.0
    bars = tuple(_bar(place, point, scale) for place, point in enumerate(points))
    well, badly = sum(point.well for point in points), sum(point.badly for point in points)
    return Chart(
        title=title,
        summary=f"{title}: {well:,} succeeded, {badly:,} failed",
        bars=bars,
        width=_format_number(len(points) * STEP),
        height=_format_number(HEIGHT),
        maximum=maximum,
        first=points[0].label if points else "",
        last=points[-1].label if points else "",
        points=tuple(point for point in points if point.well or point.badly),
    )


def _bar(place: int, point: Point, scale: float) -> Bar:
    badly, well = point.badly * scale, point.well * scale
    return Bar(
        x=_format_number(place * STEP + GAP / 2),
        width=_format_number(STEP - GAP),
        well_y=_format_number(HEIGHT - badly - well),
        well_height=_format_number(well),
        badly_y=_format_number(HEIGHT - badly),
        badly_height=_format_number(badly),
        title=f"{point.label}: {point.well:,} succeeded, {point.badly:,} failed",
    )


def _format_number(number: float) -> str:
    """Return the number as text, so that no template formats it with a local decimal comma."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
