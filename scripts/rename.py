"""Rename identifiers by the tables in scripts/names: `where<TAB>old<TAB>new[<TAB>strings]`, one rename a line.

`where` is `*`, or files and folders (with a final slash), separated by commas. With `strings`, dotted paths in string
literals change too, as in `monkeypatch.setattr("a.b.old", …)`. Words in backticks of comments and docstrings follow.
Needs Python 3.12: it tokenizes the expressions in f-strings.

`scripts/rename.py` reports errors of the tables, and new names that a file already contains: check these. With
`--apply` it writes the files unless there are errors. Then run `make format lint test-all`, correct the texts in
scripts/plants.py, and delete the applied tables.
"""

import argparse
import io
import keyword
import re
import sys
import tokenize
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "scripts" / "names"
FOLDERS = ("django_faktory", "tests", "benchmarks", "scripts", "example_project")
DOTTED = re.compile(r"""([rRbBuU]*)(['"])([\w.]+)\2""")
QUOTED = re.compile(r"`([\w.]+)(\(\))?`")


class Rename(NamedTuple):
    where: str
    old: str
    new: str
    is_in_strings: bool
    source: str


class Source:
    """A file, its tokens, and the renames that apply to it."""

    def __init__(self, path):
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.tokens = list(tokenize.generate_tokens(io.StringIO(self.text).readline))
        self.names = {token.string for token in self.tokens if token.type == tokenize.NAME}
        self.renames = {}

    def add(self, rename):
        """Return a conflict, or None and keep the rename."""
        earlier = self.renames.get(rename.old, rename)
        if earlier.new != rename.new:
            return f"{rename.source}: {rename.old} is already renamed to {earlier.new} by {earlier.source}"
        self.renames[rename.old] = rename
        return None

    def doubts(self):
        """Yield each new name that this file already contains; as an attribute or a module it may be no conflict."""
        taken = defaultdict(list)
        for old, rename in self.renames.items():
            if old in self.names:
                taken[rename.new].append(rename)
        for new, renames in taken.items():
            if len(renames) > 1:
                yield f"{self.path.relative_to(ROOT)}: {', '.join(one.source for one in renames)} all become {new}"
            elif new in self.names and new not in self.renames:
                yield f"{self.path.relative_to(ROOT)}: {renames[0].source}: {renames[0].old} becomes {new}, which exists"

    def changed(self):
        """Return the text with the new names."""
        lines = self.text.splitlines(keepends=True)
        for token in reversed(self.tokens):
            new = self._changed(token)
            if new == token.string:
                continue
            (first, begin), (last, end) = token.start, token.end
            lines[first - 1 : last] = [lines[first - 1][:begin] + new + lines[last - 1][end:]]
        return "".join(lines)

    def _changed(self, token):
        text = token.string
        if token.type == tokenize.NAME:
            return self.renames[text].new if text in self.renames else text
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and text.startswith(('"""', 'r"""'))):
            return QUOTED.sub(lambda found: f"`{self._path(found[1])}{found[2] or ''}`", text)
        if token.type == tokenize.STRING and (found := DOTTED.fullmatch(text)):
            return f"{found[1]}{found[2]}{self._path(found[3], is_string=True)}{found[2]}"
        return text

    def _path(self, dotted, *, is_string=False):
        words = []
        for word in dotted.split("."):
            rename = self.renames.get(word)
            words.append(rename.new if rename and (rename.is_in_strings or not is_string) else word)
        return ".".join(words)


def read(table):
    """Yield the renames of a table; a malformed line ends the program."""
    for number, line in enumerate(table.read_text(encoding="utf-8").splitlines(), 1):
        where, old, new, *more = line.split("\t")
        if not (old.isidentifier() and new.isidentifier()) or keyword.iskeyword(new):
            sys.exit(f"{table.name}:{number}: expected two identifiers, got {old!r} and {new!r}")
        yield Rename(where, old, new, more == ["strings"], f"{table.name}:{number}")


def is_meant(rename, name):
    """Return whether the rename applies to the file of this name."""
    places = rename.where.split(",")
    return "*" in places or any(name == place or (place.endswith("/") and name.startswith(place)) for place in places)


def main():
    parser = argparse.ArgumentParser(description="Rename identifiers by the tables in scripts/names.")
    parser.add_argument("--apply", action="store_true", help="write the files")
    options = parser.parse_args()
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    sources = {path.relative_to(ROOT).as_posix(): Source(path) for path in paths if "migrations" not in path.parts}
    errors = []
    for rename in (rename for table in sorted(TABLES.glob("*.tsv")) for rename in read(table)):
        meant = [source for name, source in sources.items() if is_meant(rename, name)]
        used = [source for source in meant if rename.old in source.names or rename.is_in_strings]
        if not used:
            errors.append(f"{rename.source}: {rename.old} is not used in {rename.where}")
        errors += filter(None, [source.add(rename) for source in used])
    print(*(f"check {doubt}" for source in sources.values() for doubt in source.doubts()), sep="\n")
    print(*(f"error {error}" for error in errors), sep="\n")
    if options.apply and not errors:
        for source in sources.values():
            source.path.write_text(source.changed(), encoding="utf-8")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
