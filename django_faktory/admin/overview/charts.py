"""Compute charts for SVG templates: numbers in, coordinates and labels out. Pure.

Without a library, a script or colours: the templates and their style sheet draw bars, lines and axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from django.utils.translation import gettext

from ..formats import format_latency, format_number

# In units of the viewBox, which the template stretches to the width of the page.
HEIGHT = 100.0
STEP, GAP = 10.0, 2.0
MIN_LATENCY_S = 0.001
"""Lower end of the axis of latencies, which is logarithmic: 5 ms and 5 minutes are on one chart."""
X_LABELS = 6


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


class Mark(NamedTuple):
    """A vertical line at the time of an event, such as the start of workers."""

    x: str
    title: str


class Axes(NamedTuple):
    """Size of a chart in units of its viewBox, and the labels of its axes."""

    width: str
    height: str
    y_labels: tuple[str, ...]
    """From top to bottom, at equal distances."""
    x_labels: tuple[str, ...]


class Chart(NamedTuple):
    """Values needed by the template of a bar chart."""

    title: str
    summary: str
    bars: tuple[Bar, ...]
    axes: Axes
    maximum: int
    points: tuple[Point, ...]
    """Intervals in which a job ended, for the table that repeats the chart as text."""
    marks: tuple[Mark, ...] = ()


class Latencies(NamedTuple):
    """Quantiles of one interval in seconds; None if no job started or ended in it."""

    label: str
    p50: float | None
    p95: float | None
    p99: float | None


class Line(NamedTuple):
    """Dots and connected lines of one quantile."""

    name: str
    path: str
    """The `d` attribute of an SVG path, with a gap for each interval without a value."""


class LineChart(NamedTuple):
    """Values needed by the template of a line chart."""

    title: str
    lines: tuple[Line, ...]
    axes: Axes
    points: tuple[tuple[str, str, str, str], ...]
    """Label, p50, p95 and p99 of the intervals with values, for the table."""
    marks: tuple[Mark, ...] = ()


def build_chart(title: str, points: Sequence[Point], marks: tuple[Mark, ...] = ()) -> Chart:
    """Return a chart with bars scaled to the highest one."""
    maximum = max((point.succeeded + point.failed for point in points), default=0)
    scale = HEIGHT / maximum if maximum else 0.0
    bars = tuple(_build_bar(index, point, scale) for index, point in enumerate(points))
    succeeded, failed = sum(point.succeeded for point in points), sum(point.failed for point in points)
    y_labels = (*map(format_number, (maximum, maximum // 2) if maximum > 1 else (maximum,)), "0")
    return Chart(
        title=title,
        summary=_describe(title, succeeded, failed),
        bars=bars,
        axes=_build_axes([point.label for point in points], y_labels),
        maximum=maximum,
        points=tuple(point for point in points if point.succeeded or point.failed),
        marks=marks,
    )


def build_line_chart(title: str, points: Sequence[Latencies], marks: tuple[Mark, ...] = ()) -> LineChart:
    """Return a chart of quantiles over time, with a logarithmic axis from 1 ms to the next power of ten."""
    longest = max((point.p99 or 0.0 for point in points), default=0.0)
    # Minus 1e-9: a rounding error must not add a decade above an exact power of ten.
    decades = max(1, math.ceil(math.log10(max(longest, MIN_LATENCY_S) / MIN_LATENCY_S) - 1e-9))
    lines = tuple(
        Line(name, _build_path([getattr(point, name) for point in points], decades)) for name in ("p50", "p95", "p99")
    )
    y_labels = tuple(format_latency(MIN_LATENCY_S * 10**power) for power in range(decades, -1, -1))
    return LineChart(
        title=title,
        lines=lines,
        axes=_build_axes([point.label for point in points], y_labels),
        points=tuple(
            (point.label, format_latency(point.p50), format_latency(point.p95), format_latency(point.p99))
            for point in points
            if point.p50 is not None
        ),
        marks=marks,
    )


def build_marks(events: Sequence[tuple[datetime, str]], first: datetime, interval_s: float) -> tuple[Mark, ...]:
    """Return a mark for each event after `first`, the beginning of a chart with these intervals."""
    return tuple(
        Mark(_coordinate((at - first).total_seconds() / interval_s * STEP), title)
        for at, title in events
        if at >= first
    )


def _build_axes(labels: Sequence[str], y_labels: tuple[str, ...]) -> Axes:
    step = max(1, math.ceil(len(labels) / X_LABELS))
    return Axes(_coordinate(len(labels) * STEP), _coordinate(HEIGHT), y_labels, tuple(labels[::step]))


def _build_path(seconds: Sequence[float | None], decades: int) -> str:
    parts, is_connected = [], False
    for index, value in enumerate(seconds):
        if value is None:
            is_connected = False
            continue
        share = math.log10(max(value, MIN_LATENCY_S) / MIN_LATENCY_S) / decades
        x, y = _coordinate((index + 0.5) * STEP), _coordinate(HEIGHT * (1 - min(1.0, share)))
        # A line of length 0 after each move is drawn as a dot: a value between two gaps is visible too.
        parts.append(f"L{x} {y}" if is_connected else f"M{x} {y}h0")
        is_connected = True
    return "".join(parts)


def _build_bar(index: int, point: Point, scale: float) -> Bar:
    failed, succeeded = point.failed * scale, point.succeeded * scale
    return Bar(
        x=_coordinate(index * STEP + GAP / 2),
        width=_coordinate(STEP - GAP),
        succeeded_y=_coordinate(HEIGHT - failed - succeeded),
        succeeded_height=_coordinate(succeeded),
        failed_y=_coordinate(HEIGHT - failed),
        failed_height=_coordinate(failed),
        title=_describe(point.label, point.succeeded, point.failed),
    )


def _describe(title: str, succeeded: int, failed: int) -> str:
    return gettext("%(title)s: %(succeeded)s succeeded, %(failed)s failed") % {
        "title": title,
        "succeeded": format_number(succeeded),
        "failed": format_number(failed),
    }


def _coordinate(number: float) -> str:
    """Return the number as text, so that no template formats it with a local decimal comma."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
