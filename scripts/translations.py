"""Keep the catalogues of translations up to date: `django_faktory/locale/<language>/LC_MESSAGES/django.po` and `.mo`.

    python scripts/translations.py [--check] [--new LANGUAGE]

Extract the texts of the package, merge them into each catalogue, and compile it. `--check` writes nothing: it fails if
a text is missing, not translated or fuzzy, if placeholders differ, or if a compiled catalogue is outdated. Needs Babel,
but no GNU gettext: Django's own `makemessages` calls it.
"""

import argparse
import io
import re
import sys
from pathlib import Path

from babel.messages import Catalog
from babel.messages.extract import extract
from babel.messages.mofile import read_mo, write_mo
from babel.messages.pofile import read_po, write_po
from django.utils.translation.template import templatize

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "django_faktory"
LOCALE = PACKAGE / "locale"
KEYWORDS = {
    "gettext": None, "gettext_lazy": None, "gettext_noop": None, "_": None,
    "ngettext": (1, 2), "ngettext_lazy": (1, 2),
    "pgettext": ((1, "c"), 2), "pgettext_lazy": ((1, "c"), 2),
    "npgettext": ((1, "c"), 2, 3), "npgettext_lazy": ((1, "c"), 2, 3),
    "translatable": None, "InvalidCron": (2,), "InvalidLimit": None, "InvalidQuery": None, "InvalidTransition": None,
}  # fmt: skip
PLACEHOLDER = re.compile(r"%\(\w+\)s|\{\w*\}|</?\w+[^>]*>")
"""What a translation must repeat: placeholders, and tags of HTML."""
UNUSED_HEADER = re.compile(
    rb'"(Project-Id-Version|Report-Msgid-Bugs-To|POT-Creation-Date|PO-Revision-Date|Last-Translator|Language-Team'
    rb"|Generated-By): .*\n"
)
"""Fields that name people, or that change without a change of the texts."""
WIDTH = 110


def extract_texts():
    """Return a catalogue with all texts of the package, in the order of their files."""
    catalogue = Catalog(project="django-faktory", charset="utf-8")
    for path in sorted([*PACKAGE.rglob("*.py"), *(PACKAGE / "templates").rglob("*.html")]):
        source = path.read_text(encoding="utf-8")
        if path.suffix == ".html":
            # Lines of Python calls; their indentation has no meaning, and would be an error.
            source = "\n".join(line.strip() for line in templatize(source).splitlines())
        name = path.relative_to(ROOT).as_posix()
        for _, text, _, context in extract("python", io.BytesIO(source.encode()), KEYWORDS):
            catalogue.add(text, locations=[(name, None)], context=context)
    return catalogue


def read_catalogue(path):
    """Return the catalogue of a language."""
    with path.open("rb") as file:
        return read_po(file, locale=path.parent.parent.name)


def merge(catalogue, texts):
    """Add new texts to the catalogue and remove those that are no longer used. Guess no translation."""
    catalogue.update(texts, no_fuzzy_matching=True, update_creation_date=False)
    catalogue.obsolete.clear()
    return catalogue


def format_po(catalogue):
    """Return the catalogue as the text of its file."""
    file = io.BytesIO()
    write_po(file, catalogue, width=WIDTH, sort_by_file=True, include_lineno=False)
    return UNUSED_HEADER.sub(b"", file.getvalue())


def compile_mo(catalogue):
    """Return the catalogue in the form that Django reads."""
    file = io.BytesIO()
    write_mo(file, catalogue)
    return file.getvalue()


def mo_texts(mo):
    """Return the texts of a compiled catalogue, without its header, which has the version of Babel."""
    return [(message.context, message.id, message.string) for message in read_mo(io.BytesIO(mo)) if message.id]


def find_problems(path, texts, *, root=ROOT):
    """Return what is wrong with a catalogue, in lines that name its file below `root` and the text."""
    catalogue = read_catalogue(path)
    problems = []
    if format_po(merge(read_catalogue(path), texts)) != path.read_bytes():
        problems.append("has other texts than the package: run scripts/translations.py")
    for message in catalogue:
        if message.id:
            problems += [f"{message.id!r}: {problem}" for problem in check_message(message)]
    mo = path.with_suffix(".mo")
    if not mo.exists() or mo_texts(mo.read_bytes()) != mo_texts(compile_mo(catalogue)):
        problems.append(f"{mo.name} is outdated: run scripts/translations.py")
    return [f"{path.relative_to(root)}: {problem}" for problem in problems]


def check_message(message):
    """Return what is wrong with a translation."""
    sources = message.id if isinstance(message.id, tuple) else (message.id,)
    translations = message.string if isinstance(message.string, tuple) else (message.string,)
    problems = ["is fuzzy"] if message.fuzzy else []
    if not all(translations):
        return [*problems, "is not translated"]
    # A singular may leave the number out, as in "One job": each form must have placeholders of one of the two.
    allowed = [sorted(PLACEHOLDER.findall(source)) for source in sources]
    if any(sorted(PLACEHOLDER.findall(text)) not in allowed for text in translations):
        problems.append("has other placeholders in its translation")
    if any(text.endswith(".") != sources[0].endswith(".") for text in translations):
        problems.append("ends differently in its translation")
    return problems


def add_language(language):
    """Create an empty catalogue."""
    path = LOCALE / language / "LC_MESSAGES" / "django.po"
    path.parent.mkdir(parents=True)
    catalogue = Catalog(
        locale=language,
        project="django-faktory",
        header_comment=f"# Translation of django-faktory: {language}",
        charset="utf-8",
        fuzzy=False,
    )
    path.write_bytes(format_po(catalogue))


def main():
    parser = argparse.ArgumentParser(description="Update and compile the catalogues of translations.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is missing")
    parser.add_argument("--new", metavar="LANGUAGE", help="create the catalogue of a language, such as fr")
    options = parser.parse_args()
    if options.new:
        add_language(options.new)
    texts = extract_texts()
    paths = sorted(LOCALE.glob("*/LC_MESSAGES/django.po"))
    if not options.check:
        for path in paths:
            catalogue = merge(read_catalogue(path), texts)
            path.write_bytes(format_po(catalogue))
            path.with_suffix(".mo").write_bytes(compile_mo(catalogue))
    problems = [problem for path in paths for problem in find_problems(path, texts)]
    print("\n".join(problems) or f"{len(texts)} texts, {len(paths)} languages")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
