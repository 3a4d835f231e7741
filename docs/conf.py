"""Configure Sphinx for `make site`. The pages remain Markdown with links between files.

Sphinx writes signatures and docstrings into `reference/python.md`. The navigation is generated from the lists of pages
in each `index.md`, which readers on a code host use too.
The tag `design` builds the decisions in `adr/` as a site of their own, below `design/`: the documentation's search and
sidebar have none of them.
"""

import json
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

from django.db.models.query_utils import DeferredAttribute
from pygments.lexers.special import TextLexer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from scripts.reference import set_up_django  # noqa: E402  (found by the path above)

IS_DESIGN = tags.has("design")  # noqa: F821  (a name that Sphinx defines)
PAGES = HERE / "adr" if IS_DESIGN else HERE

project = "django_faktory"
author = "the django_faktory developers"
project_copyright = author
release = re.search(r'^__version__ = "(.+)"$', (ROOT / "django_faktory" / "__init__.py").read_text(), re.MULTILINE)[1]

set_up_django()  # for the docstrings of models

extensions = ["myst_parser", "sphinx.ext.autodoc"]
add_module_names = False
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_typehints_format = "short"
default_role = "py:obj"  # names in docstrings: a link if the reference has the name
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
exclude_patterns = ["_build", "adr"]
myst_heading_anchors = 4  # for links such as page.md#a-heading, as code hosts generate them
myst_enable_extensions = ["tasklist"]  # boxes of the production checklist
html_theme = "furo"
html_title = f"django_faktory {release}" + " design" * IS_DESIGN
html_copy_source = False
html_show_sphinx = False
html_search_scorer = str(HERE / "search.js")

NOT_SEARCHED = ("screens", "reference/licences")
"""Pages of pictures and of other packages' names: their words match what readers look for elsewhere."""

_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s:]+)\.md(#[^)\s]*)?\)")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)\s]*)?\)")
_PAGE = re.compile(r"`?docs/([\w/-]+)\.md`?")
_LISTED = re.compile(r"^- \[[^\]]+\]\(([^)#\s]+)\.md\)", re.MULTILINE)


def repository():
    """Return the address in pyproject.toml under which files that are not pages are found."""
    read = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return read["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]


def point_outside(page, text):
    """Return the text with links to files outside docs/ replaced by links to the repository."""
    base = repository()

    def replaced(match):
        words, target = match.groups()
        path = (page.parent / target).resolve()
        if path.is_relative_to(HERE):
            return match[0]
        name = path.relative_to(ROOT).as_posix()
        return f"[{words}]({base}/blob/v{release}/{name})"

    return _OUTSIDE.sub(replaced, text)


def link_sites(page, text):
    """Return the text with links between the documentation and the decisions as links between two sites."""

    def replaced(match):
        words, target, anchor = match.groups()
        path = (page.parent / target).resolve()
        if not path.is_relative_to(HERE) or path.is_relative_to(HERE / "adr") == IS_DESIGN:
            return match[0]
        base = "../" * (len(page.relative_to(PAGES).parts) - 1) + ("../" if IS_DESIGN else "design/")
        place = path.relative_to(HERE if IS_DESIGN else HERE / "adr").as_posix()
        return f'<a href="{base}{place}.html{anchor or ""}">{words}</a>'

    return _LINK.sub(replaced, text)


def with_navigation(text):
    """Return the front page with a hidden toctree for each section that lists pages."""
    trees = []
    for section in text.split("\n## ")[1:]:
        pages = _LISTED.findall(section)
        if pages:
            caption = section.splitlines()[0]
            trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]))
    return "\n\n".join([text, *trees]) + "\n"


def read(_app, docname, source):
    """Replace a page's text before Sphinx parses it."""
    page = PAGES / f"{docname}.md"
    source[0] = link_sites(page, point_outside(page, source[0]))
    if docname == "index":
        source[0] = with_navigation(source[0])
    if docname in NOT_SEARCHED:
        source[0] = f"---\nnosearch: true\n---\n{source[0]}"


def describe(_app, _kind, _name, obj, _options, lines):
    """Give a column of a model its help text, and turn the names of pages in docstrings into links."""
    if isinstance(obj, DeferredAttribute):
        lines[:] = [str(obj.field.help_text)]
    lines[:] = [_PAGE.sub(r":doc:`/\1`", line) for line in lines]


def add_words(app, pagename, _template, _context, _doctree):
    """Give the search the words of all pages and their numbers, from which it takes suggestions."""
    if pagename == "search":
        texts = " ".join(Path(app.env.doc2path(name)).read_text(encoding="utf-8") for name in app.env.found_docs)
        words = dict(Counter(re.findall(r"[^\W\d_]{4,}", texts.lower())).most_common())
        app.add_js_file(None, body=json.dumps(words), type="application/json", id="words-of-the-pages")


def setup(app):
    """Register the lexer and the handlers; Sphinx calls this function."""
    app.add_lexer("mermaid", TextLexer)  # code hosts draw the diagram; here it is shown as text
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", describe)
    app.connect("html-page-context", add_words)
