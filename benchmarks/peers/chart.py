"""Draw an SVG chart without a library: a few figures, a bar per system, the best on top, ours in another colour."""

from html import escape

from benchmarks.peers.figures import CHARTED, FIGURES, medians

PANEL, GAP, MARGIN = 490, 20, 16
LABEL, VALUE = 225, 70  # widths of the names and of the values in a panel
BAR, STEP, HEAD = 14, 22, 34
OURS, THEIRS = "#0b7a75", "#9aa5b1"


def chart(found):
    """Return the SVG with one panel for each charted figure, two in a row."""
    values = medians(found)
    figures = [figure for figure in FIGURES if figure.key in CHARTED]
    rows = max(1, len(found["systems"]))
    height = HEAD + rows * STEP + GAP
    width = 2 * MARGIN + 2 * PANEL + GAP
    parts = [
        _panel(figure, found, values, x=MARGIN + place % 2 * (PANEL + GAP), y=MARGIN + place // 2 * height)
        for place, figure in enumerate(figures)
    ]
    total = 2 * MARGIN + -(-len(figures) // 2) * height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}" height="{total}" '
        f'font-family="system-ui, sans-serif" font-size="13" role="img" aria-label="django_faktory and its peers">\n'
        f'<rect width="{width}" height="{total}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def bars(figure, found, values):
    """Return (name, value) of each system that has the figure, the best first."""
    known = [(name, values[name][figure.key]) for name in found["systems"] if values[name][figure.key] is not None]
    return sorted(known, key=lambda one: one[1], reverse=figure.more_is_better)


def _panel(figure, found, values, *, x, y):
    known = bars(figure, found, values)
    longest = max((value for _, value in known), default=0) or 1
    lines = [f'<text x="{x}" y="{y + 16}" font-weight="600" fill="#1f2933">{escape(figure.title)}</text>']
    for place, (name, value) in enumerate(known):
        about, top = found["systems"][name], y + HEAD + place * STEP
        length = max(1.0, value / longest * (PANEL - LABEL - VALUE))
        weight = ' font-weight="600"' if about["ours"] else ""
        text = f'y="{top + BAR - 2}" fill="#1f2933"{weight}'
        label = f'<text x="{x + LABEL - 8}" {text} text-anchor="end">{escape(about["title"])}</text>'
        colour = OURS if about["ours"] else THEIRS
        bar = f'<rect x="{x + LABEL}" y="{top}" width="{length:.1f}" height="{BAR}" rx="2" fill="{colour}"/>'
        lines += [label, bar, f'<text x="{x + LABEL + length + 6:.1f}" {text}>{figure.shown(value)}</text>']
    return "\n".join(lines)
