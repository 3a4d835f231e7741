"""Write the table of limits in docs/reference/command-limits.md from `core.protocol.limits`; a test checks it."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "command-limits.md"
BEGIN = "<!-- limits: written by `make docs` from django_faktory/core/protocol/limits.py -->\n"
END = "<!-- end of limits -->\n"


def render():
    """Return the text of the table between its markers."""
    from django_faktory.core.protocol.limits import LIMITS  # found by the path that `main` sets

    rows = "".join(f"| `{one.verb}` | {one.field} | {one.text} | {one.beyond} |\n" for one in LIMITS)
    return f"{BEGIN}\n| verb | field | at most | beyond it |\n|---|---|---:|---|\n{rows}\n{END}"


def main():
    sys.path.insert(0, str(ROOT))
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(before + render() + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
