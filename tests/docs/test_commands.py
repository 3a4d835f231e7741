"""Test the commands in the documentation: the subcommands and options exist, and the parser accepts each line."""

import argparse
import re
import shlex

import pytest
import yaml
from django.core.management import load_command_class
from django.core.management.base import CommandError

from django_faktory.management.cli.subcommands import subcommands
from tests.docs.pages import DOCS, ROOT, name, pages, section, text_of

pytestmark = pytest.mark.core

PAGES = [page for page in pages() if page.name != "CHANGELOG.md"]


def known_options():
    parser = argparse.ArgumentParser(add_help=False)
    load_command_class("django_faktory", "runfaktory").add_arguments(parser)
    return {option for action in parser._actions for option in action.option_strings}


def test_options_of_runfaktory_in_the_docs_exist():
    known, unknown = known_options(), []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for line in re.findall(r"runfaktory\b([^\n`;|]*)", text):
            unknown += [f"{name(page)}: {one}" for one in re.findall(r"(?<![\w-])--[a-z-]+", line) if one not in known]
    assert unknown == []


def command_lines():
    """Yield the text after `manage.py faktory` in all pages, and after `faktory` in backticks in the guides."""
    for page in PAGES:
        if page.name == "commands.md":  # `make docs` writes its lines
            continue
        text = page.read_text(encoding="utf-8")
        lines = re.findall(r"manage\.py faktory ([a-z][^\n`]*)", text)
        if page.parent.name == "howto":
            lines += re.findall(r"`faktory ([a-z][^\n`]*)`", text)
        for line in lines:
            if "…" not in line:
                yield page, line


def test_the_docs_contain_command_lines():
    assert len(list(command_lines())) > 20


@pytest.mark.parametrize(("page", "line"), [pytest.param(*one, id=one[1]) for one in command_lines()])
def test_a_documented_command_line_is_accepted_by_the_parser(page, line):
    words = shlex.split(line, comments=True)
    assert words[0] in subcommands(), name(page)
    parser = load_command_class("django_faktory", "faktory").create_parser("manage.py", "faktory")
    if len(words) == 1:
        return  # the page only names the subcommand
    try:
        parser.parse_args(words)
    except (CommandError, SystemExit) as error:
        pytest.fail(f"{name(page)}: faktory {line}: {error}")


@pytest.mark.parametrize("page", sorted((DOCS / "howto").glob("*.md")), ids=name)
def test_yaml_in_the_guides_can_be_parsed(page):
    for code in re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        assert list(yaml.safe_load_all(code))


def test_alerts_use_only_existing_metrics():
    known = set(re.findall(r"`(django_faktory_\w+)`", section(text_of("reference", "metrics.md"), "## Prometheus")))
    asked = set(
        re.findall(r"\bdjango_faktory_\w+", "".join(page.read_text() for page in (DOCS / "howto").glob("*.md")))
    )
    assert asked
    assert asked <= known


def test_documented_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    documented = {
        word for page in PAGES for word in re.findall(r"(?:`|\$ )make ([a-z]+)\b", page.read_text(encoding="utf-8"))
    }
    assert documented <= targets
