"""Read the pages of the documentation: texts, tables, headings and examples."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```.*?^```$", flags=re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    """A block of Python in a page; `line` is the number of its first line."""

    page: Path
    line: int
    code: str

    def __str__(self) -> str:
        return f"{name(self.page)}:{self.line}"


def name(path):
    return path.relative_to(ROOT).as_posix()


def text_of(*parts):
    return DOCS.joinpath(*parts).read_text(encoding="utf-8")


def pages():
    """Return every page of the documentation, of the benchmarks, and at the root of the repository."""
    return [*sorted(DOCS.rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md")), *sorted(ROOT.glob("*.md"))]


def section(text, heading):
    """Return the text below a heading, up to the next heading of its level or a higher one."""
    level = len(heading.partition(" ")[0])
    masked = re.sub(FENCE, lambda block: re.sub(r"[^\n]", ".", block[0]), text)  # comments in code are no headings
    begin = re.search(rf"^{re.escape(heading)}$", masked, flags=re.MULTILINE).end()
    end = re.compile(rf"^#{{1,{level}}} ", flags=re.MULTILINE).search(masked, begin)
    return text[begin : end.start() if end else None]


def first_cells(text):
    """Return the texts in backticks in the first column of tables."""
    cells = re.findall(r"^\| ([^|]*(?:\\\|[^|]*)*) \|", text, flags=re.MULTILINE)
    return [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]


def without_fences(text):
    """Return the page without its code blocks."""
    return FENCE.sub("", text)


def anchors(page):
    """Return the anchors of a page's headings, as forges and Sphinx generate them."""
    titles = re.findall(r"^#{1,6} +(.+?) *$", without_fences(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def examples(*paths):
    for page in paths or pages():
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
            yield Example(page, text[: found.start(1)].count("\n") + 1, found[1])
