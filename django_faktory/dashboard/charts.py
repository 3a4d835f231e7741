"""Bars as a template draws them in SVG: numbers in, places out. Pure; no library, no script, no colour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

HEIGHT = 100.0
STEP, GAP = 10.0, 2.0


class Point(NamedTuple):
    """What ended well and badly in a stretch of time."""

    label: str
    well: int
    badly: int


class Bar(NamedTuple):
    """A stretch of time: failures below, the rest on top of them."""

    x: str
    width: str
    well_y: str
    well_height: str
    badly_y: str
    badly_height: str
    title: str


class Chart(NamedTuple):
    """All that the template needs."""

    title: str
    summary: str
    bars: tuple[Bar, ...]
    width: str
    height: str
    most: int
    first: str
    last: str
    points: tuple[Point, ...]
    """Those in which something ended: for the table that says the same in words."""


def chart(title: str, points: Sequence[Point]) -> Chart:
    """Bars as high as the highest allows."""
    most = max((point.well + point.badly for point in points), default=0)
    scale = HEIGHT / most if most else 0.0
    bars = tuple(_bar(place, point, scale) for place, point in enumerate(points))
    well, badly = sum(point.well for point in points), sum(point.badly for point in points)
    return Chart(
        title=title,
        summary=f"{title}: {well:,} succeeded, {badly:,} failed",
        bars=bars,
        width=_told(len(points) * STEP),
        height=_told(HEIGHT),
        most=most,
        first=points[0].label if points else "",
        last=points[-1].label if points else "",
        points=tuple(point for point in points if point.well or point.badly),
    )


def _bar(place: int, point: Point, scale: float) -> Bar:
    badly, well = point.badly * scale, point.well * scale
    return Bar(
        x=_told(place * STEP + GAP / 2),
        width=_told(STEP - GAP),
        well_y=_told(HEIGHT - badly - well),
        well_height=_told(well),
        badly_y=_told(HEIGHT - badly),
        badly_height=_told(badly),
        title=f"{point.label}: {point.well:,} succeeded, {point.badly:,} failed",
    )


def _told(number: float) -> str:
    """Text, so that no template writes it with the comma of some language."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
