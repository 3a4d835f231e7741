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
from docutils import nodes
from sphinx import addnodes
from sphinx.writers.html5 import HTML5Translator

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from scripts.diagrams import BLOCK, path_of  # noqa: E402  (found by the path above)
from scripts.reference import set_up_django  # noqa: E402

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
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
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


def draw(text):
    """Return the text with each diagram's drawing in place of its text, which code hosts draw."""
    html = '```{{raw}} html\n<div class="diagram">{}</div>\n```'
    return BLOCK.sub(lambda block: html.format(path_of(block[1]).read_text(encoding="utf-8").strip()), text)


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
    source[0] = draw(link_sites(page, point_outside(page, source[0])))
    if docname == "index":
        source[0] = with_navigation(source[0])
    if docname in NOT_SEARCHED:
        source[0] = f"---\nnosearch: true\n---\n{source[0]}"


def describe(_app, _kind, _name, obj, _options, lines):
    """Give a column of a model its help text, and turn the names of pages in docstrings into links."""
    if isinstance(obj, DeferredAttribute):
        lines[:] = [str(obj.field.help_text)]
    lines[:] = [_PAGE.sub(r":doc:`/\1`", line) for line in lines]


def finish_page(app, pagename, _template, context, _doctree):
    """Add what the search takes suggestions from: the words of all pages, and how often they occur.

    The captions of the theme's navigation are headings without a level.
    """
    navigation = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = navigation.replace('role="heading"', 'role="heading" aria-level="2"')
    if pagename == "search":
        texts = " ".join(Path(app.env.doc2path(name)).read_text(encoding="utf-8") for name in app.env.found_docs)
        words = dict(Counter(re.findall(r"[^\W\d_]{4,}", texts.lower())).most_common())
        app.add_js_file(None, body=json.dumps(words), type="application/json", id="words-of-the-pages")


class Translator(HTML5Translator):
    """Write tables that `site.css` can show as cards: each cell has the heading of its column.

    They have roles, because browsers take a table that is not displayed as one for mere text. The lists in signatures,
    which have no terms, have none.
    """

    ROLES = {  # noqa: RUF012
        nodes.table: "table",
        nodes.thead: "rowgroup",
        nodes.tbody: "rowgroup",
        nodes.row: "row",
        addnodes.desc_parameterlist: "none",
    }

    def starttag(self, node, tagname, *args, **attributes):
        """Add the role of a part of a table or signature, and the heading of a cell."""
        if role := self.ROLES.get(type(node)):
            attributes["role"] = role
        elif isinstance(node, nodes.entry):
            row, part = node.parent, node.parent.parent
            attributes["role"] = "columnheader" if tagname == "th" else "cell"
            if isinstance(part, nodes.tbody):
                [heads] = next(part.parent.findall(nodes.thead))
                attributes["data-heading"] = heads[row.index(node)].astext()
        return super().starttag(node, tagname, *args, **attributes)

    def visit_entry(self, node):
        """Write a heading without a text as a cell: it is none."""
        if not node.astext() and isinstance(node.parent.parent, nodes.thead):
            self.body.append(self.starttag(node, "td", ""))
            self.context.append("</td>\n")
            node.parent.column += 1
        else:
            super().visit_entry(node)


def setup(app):
    """Register the translator and the handlers; Sphinx calls this function."""
    app.set_translator("html", Translator)
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", describe)
    app.connect("html-page-context", finish_page, priority=900)  # after the theme, which makes the navigation
