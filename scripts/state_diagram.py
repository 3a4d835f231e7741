"""Write the diagram of a job's states into docs/reference/protocol.md; tests/test_house_rules.py checks that it is up to date."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "protocol.md"
BEGIN = "<!-- Written by `make docs` from django_faktory/core/lifecycle.py. Change the table there. -->\n"
END = "<!-- Here the diagram ends. -->\n"


def render():
    """Return the page's text with the diagram generated from the table in the code."""
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE}: expected the lines {BEGIN!r} and {END!r} around the diagram")
    return before + begin + diagram() + end + after


def diagram():
    """Return the diagram: an arrow from each state to each possible next one, with all events that lead there."""
    from django_faktory.core.lifecycle import GONE, TRANSITIONS, State  # found by the path that `main` sets

    places = [GONE, *State]
    arrows = {}
    for source in places:
        for event, targets in TRANSITIONS.get(source, {}).items():
            for target in sorted(targets, key=places.index):
                arrows.setdefault((source, target), []).append(str(event))
    lines = [f"    {shown(a)} --> {shown(b)}: {', '.join(events)}\n" for (a, b), events in arrows.items()]
    return "```mermaid\nstateDiagram-v2\n" + "".join(lines) + "```\n"


def shown(state):
    return "[*]" if state is None else str(state)


def main():
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
