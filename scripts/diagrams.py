"""Draw the diagrams of the documentation: a block of Mermaid in a page becomes an SVG in docs/img/diagrams.

Code hosts draw the block; the site has the SVG in its place (docs/conf.py), so that readers load no script. `make
diagrams` needs Chromium and scripts/node. tests/docs/test_diagrams.py checks that each SVG is that of its text.
"""

import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "img" / "diagrams"
BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
STYLE = """{
& text { fill: var(--color-foreground-primary, #000); font: 14px sans-serif; stroke: none; text-anchor: middle; }
& .node .label { transform: translateY(-9.5px); }
& .node .label rect, .edgeLabel g > rect { stroke: none; }
& .node :is(rect, polygon, path) { fill: var(--color-background-secondary, #f8f9fb); }
& .node :is(rect, polygon, path) { stroke: var(--color-foreground-border, #878787); }
& .edgeLabel rect { fill: var(--color-background-primary, #fff); }
& .edgePaths path { fill: none; stroke: var(--color-foreground-secondary, #5a5c63); }
& :is(marker path, .state-start) { fill: var(--color-foreground-secondary, #5a5c63); stroke: none; }
}"""
"""The colours of the page, light or dark; without a page, light ones."""


def name_of(text):
    """Return the name of a diagram, by its title."""
    return re.sub(r"\W+", "-", re.search(r"accTitle: (.+)", text)[1].lower())


def digest_of(text):
    return hashlib.sha256((text + STYLE).encode()).hexdigest()[:16]


def path_of(text):
    return FOLDER / f"{name_of(text)}.svg"


def texts():
    """Return the text of each diagram of the pages."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return [text for page in pages for text in BLOCK.findall(page.read_text(encoding="utf-8"))]


def finish(svg, text):
    """Return the SVG with our style, without what only Mermaid's scripts read, and with the digest of its text."""
    name = name_of(text)
    svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:data-[\w-]+|style|width="100%")(?:="[^"]*")?', "", svg)
    wide = round(float(re.search(r'viewBox="\S+ \S+ (\S+) ', svg)[1]))
    svg = re.sub(r"<svg ([^>]*>)", rf'<svg width="{wide}" \1<style>#{name} {STYLE}</style>', svg, count=1)
    return svg.replace("<svg ", f'<svg data-text="{digest_of(text)}" ', 1) + "\n"


def main():
    sys.path.insert(0, str(ROOT))
    from playwright.sync_api import sync_playwright

    from tests.services import chromium_path

    options = {
        "startOnLoad": False, "theme": "neutral", "htmlLabels": False, "fontFamily": "sans-serif", "fontSize": 14,
        "deterministicIds": True, "flowchart": {"htmlLabels": False},
    }  # fmt: skip
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
        page = browser.new_page()
        page.add_script_tag(path=ROOT / "scripts" / "node" / "node_modules" / "mermaid" / "dist" / "mermaid.min.js")
        page.evaluate("options => mermaid.initialize(options)", options)
        for text in texts():
            drawn = page.evaluate(
                "async ([name, text]) => (await mermaid.render(name, text)).svg", [name_of(text), text]
            )
            path_of(text).write_text(finish(drawn, text), encoding="utf-8")
        browser.close()


if __name__ == "__main__":
    main()
