"""How Sphinx makes a site of these pages: `make site`. The pages stay what they are: Markdown with links between files.

The navigation is read from `index.md`, whose lists of pages are for people on a forge, too.
"""

import re
import tomllib
from pathlib import Path

from pygments.lexers.special import TextLexer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

project = "django_faktory"
author = "the django_faktory developers"
project_copyright = author
release = re.search(r'^__version__ = "(.+)"$', (ROOT / "django_faktory" / "__init__.py").read_text(), re.MULTILINE)[1]

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4  # links such as page.md#a-heading, as a forge makes them
html_theme = "furo"
html_title = f"django_faktory {release}"
html_copy_source = False
html_show_sphinx = False

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)\s]*)?\)")
_LISTED = re.compile(r"^- \[[^\]]+\]\(([^)#\s]+)\.md\)", re.MULTILINE)


def repository():
    """Where files are that are no pages: the address that pyproject.toml names, or ""."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    return next((urls[name].rstrip("/") for name in ("Source", "Repository") if name in urls), "")


def point_outside(page, text):
    """Links to files outside of docs/ lead to the repository; where its address is not known, they name the file."""
    base = repository()

    def replaced(match):
        words, target = match.groups()
        path = (page.parent / target).resolve()
        if path.is_relative_to(HERE):
            return match[0]
        name = path.relative_to(ROOT).as_posix()
        return f"[{words}]({base}/blob/main/{name})" if base else f"{words} (`{name}`)"

    return _OUTSIDE.sub(replaced, text)


def with_navigation(text):
    """The front page, and for each of its sections that lists pages a hidden tree of them."""
    trees = []
    for section in text.split("\n## ")[1:]:
        pages = _LISTED.findall(section)
        if pages:
            caption = section.splitlines()[0]
            trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]))
    return "\n\n".join([text, *trees]) + "\n"


def read(_app, docname, source):
    """What Sphinx is given in place of a file's text."""
    source[0] = point_outside(HERE / f"{docname}.md", source[0])
    if docname == "index":
        source[0] = with_navigation(source[0])


def setup(app):
    """Called by Sphinx."""
    app.add_lexer("mermaid", TextLexer)  # a forge draws it; here the lines are read
    app.connect("source-read", read)
