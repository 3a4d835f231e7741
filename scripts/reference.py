"""Write the parts of the reference pages that come from the code; tests/docs/test_generated.py checks that they are current.

A page marks such a part: `<!-- make docs: options push -->`, a blank line, the part, a blank line, `<!-- end -->`. The
words after the colon are a function of `RENDERERS` and its arguments.
"""

import argparse
import ast
import itertools
import re
import sys
import textwrap
from dataclasses import fields
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
PART = re.compile(r"(?<=<!-- make docs: )([^\n]+)( -->\n\n)(.*?)(\n<!-- end -->)", re.DOTALL)
CODE = re.compile(r"(?<![\w-])--[a-z-]+|FAKTORY\['\w+'\]|tcp\S*//\S*[\w…]")
PAGE_NAME = re.compile(r"docs/([\w/-]+)\.md")


def fill(text):
    """Return the text of a page with each of its parts written again."""

    def write(part):
        name, *arguments = part[1].split(" ")
        return f"{part[1]}{part[2]}{RENDERERS[name](*arguments)}{part[4]}"

    return PART.sub(write, text)


def table(head, rows):
    """Return a table; cells are escaped, and have no line breaks."""
    lines = [f"| {' | '.join(map(cell, row))} |\n" for row in (head, *rows)]
    return "".join([lines[0], f"|{'---|' * len(head)}\n", *lines[1:]])


def cell(text):
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(str(text).split()))


def code(value):
    """Return a value as code, with underscores in long numbers."""
    if isinstance(value, str):
        return f'`"{value}"`'
    is_long = isinstance(value, int) and not isinstance(value, bool) and value > 9999
    return f"`{value:_}`" if is_long else f"`{value}`"


# Settings, options of a task, limits of commands


def render_settings():
    from django_faktory import conf

    rows = [(f"`{key}`", code(setting.default), setting.doc) for key, setting in conf.SETTINGS.items()]
    return table(["key", "default", "meaning"], rows)


def render_task_options():
    from django_faktory.tasks.base import FaktoryTask
    from django_faktory.tasks.options import OPTIONS

    texts = attribute_texts(ROOT / "django_faktory" / "tasks" / "base.py", "TaskOptions")
    defaults = {field.name: field.default for field in fields(FaktoryTask)}
    rows = []
    for (name, annotation), text in texts.items():
        field = "jobtype" if name == "name" else name
        takes = OPTIONS[field].expected if field in OPTIONS else f"`{annotation}`"
        rows.append((f"`{name}`", takes, code(defaults[field]), PAGE_NAME.sub(link_of, text)))
    return table(["option", "takes", "default", "what it does"], rows)


def attribute_texts(path, class_name):
    """Return the docstring of each annotated attribute of a class, by its name and annotation."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    [body] = [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == class_name]
    pairs = itertools.pairwise(body)
    return {
        (one.target.id, ast.unparse(one.annotation)): ast.literal_eval(text.value)
        for one, text in pairs
        if isinstance(one, ast.AnnAssign)
    }


def link_of(match):
    """Return a link to a page that a docstring names."""
    title = (ROOT / match[0]).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return f"[{title if title[1:] != title[1:].lower() else title.lower()}](../{match[1]}.md)"


def render_limits():
    from django_faktory.core.protocol.limits import LIMITS

    rows = [(f"`{one.verb}`", one.field, one.text, one.beyond) for one in LIMITS]
    return table(["verb", "field", "at most", "beyond it"], rows)


def render_states():
    """Return the states that can follow each state, with the events that lead there."""
    from django_faktory.core.lifecycle import GONE, TRANSITIONS, State

    rows = []
    for source in (GONE, *State):
        followers = {}
        for event, targets in TRANSITIONS.get(source, {}).items():
            for target in sorted(targets, key=[GONE, *State].index):
                followers.setdefault(target, []).append(f"`{event}`")
        texts = [f"{', '.join(events)} → {state_name(target)}" for target, events in followers.items()]
        rows.append((state_name(source), "; ".join(texts)))
    return table(["state", "events → next state"], rows)


def state_name(state):
    return "not stored" if state is None else f"*{state}*"


# Commands


def render_command(name):
    """Return the usage and the arguments of a management command, or of a subcommand of `faktory`."""
    from django.core.management import load_command_class

    from django_faktory.management.cli.subcommands import subcommands

    parser = argparse.ArgumentParser(prog=f"python manage.py {name}", add_help=False)
    if name in subcommands():
        parser.prog = f"python manage.py faktory {name}"
        for argument in subcommands()[name].arguments:
            parser.add_argument(*argument.names, **argument.options)
    else:
        load_command_class("django_faktory", name).add_arguments(parser)
    return "".join(filter(None, [description_of(name), usage_of(parser), arguments_of(parser)]))


def description_of(name):
    from django_faktory.management.cli.subcommands import subcommands

    return f"{subcommands()[name].help}\n\n" if name in subcommands() else ""


def usage_of(parser):
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=10_000)
    # Versions of Python break lines at different places.
    usage = parser.format_usage().removeprefix("usage: ").strip()
    kept = re.sub(r"\[[^\[\]]+\]", lambda option: option[0].replace(" ", "\0"), usage)
    lines = textwrap.wrap(kept, 100, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False)
    return "```console\n$ {}\n```\n".format("\n".join(lines).replace("\0", " "))


def arguments_of(parser):
    rows = [(argument_name(action), CODE.sub(r"`\g<0>`", action.help)) for action in parser._actions]  # noqa: SLF001
    return f"\n{table(['argument', 'meaning'], rows)}" if rows else ""


def argument_name(action):
    value = action.metavar or ("" if action.nargs == 0 else action.dest)
    if action.choices:
        value = "|".join(action.choices)
    if not action.option_strings:
        return f"`{value}`"
    return ", ".join(f"`{f'{option} {value}'.rstrip()}`" for option in action.option_strings)


def render_exit_codes():
    from django_faktory.management.cli.subcommand import EXIT_CODES

    return table(["exit code", "meaning"], EXIT_CODES.items())


# REST


@cache
def openapi():
    """Return the OpenAPI document of the REST API."""
    from drf_spectacular.generators import SchemaGenerator
    from drf_spectacular.settings import patched_settings

    from django_faktory.contrib.api.urls import OpenApi

    with patched_settings(OpenApi.custom_settings):
        return SchemaGenerator(urlconf=OpenApi.urlconf).get_schema(request=None, public=True)


def render_operations(tag):
    """Return the operations of a resource, then the parameters of its lists."""
    rows, parameters, known = [], {}, set()
    for path, methods in openapi()["paths"].items():
        for method, one in methods.items():
            if one["tags"] == [tag]:
                # The description of a view, or of several actions: once is enough.
                sentences = [text for text in re.split(r"(?<=\.) ", one["description"]) if text not in known]
                known.update(sentences)
                text = " ".join([f"{one['summary'].removesuffix('.')}.", *sentences])
                rows.append(
                    (
                        f"`{method.upper()} {path[1:]}`",
                        " → ".join(filter(None, [body_of(one), responses_of(one)])),
                        f"{text} Permission: `{one['x-permission']}`.",
                    )
                )
                queries = [one for one in one.get("parameters", []) if one["in"] == "query"]
                parameters |= {query["name"]: query["description"] for query in queries}
    operations = table(["request", "body → responses", "what it does"], rows)
    found = [(f"`{name}`", text) for name, text in parameters.items()]
    return operations + (f"\n{table(['parameter of the address', 'meaning'], found)}" if found else "")


def body_of(operation):
    content = operation.get("requestBody", {}).get("content")
    return link_to(content["application/json"]["schema"]) if content else ""


def responses_of(operation):
    """Return the status of each response that is not a problem, and the object in its body."""
    texts = []
    for status, response in operation["responses"].items():
        if status != "default":
            [schema] = [one["schema"] for one in response.get("content", {}).values()] or [None]
            texts.append(f"{status} {link_to(schema)}" if schema else status)
    return ", ".join(texts)


def link_to(schema):
    """Return the name of an object, as a link to its members; "several X" for an array, "page of X" for a list's page."""
    if schema.get("type") == "array":
        return f"several {link_to(schema['items'])}"
    name = schema["$ref"].rpartition("/")[2]
    kind = name.removeprefix("Paginated").removesuffix("List") if name.startswith("Paginated") else name
    return f"{'page of ' if kind != name else ''}[{kind}](#{kind.lower()})"


def render_objects():
    """Return the members of each object in bodies and responses."""
    known, texts = {}, []
    for name, schema in openapi()["components"]["schemas"].items():
        members = schema.get("properties", {})
        if name.startswith("Paginated"):
            continue
        # Members that a smaller object has too are described there.
        smaller = [one for one, of_it in known.items() if len(of_it) > 3 and of_it.items() <= members.items()]
        base = max(smaller, key=lambda one: len(known[one]), default=None)
        own = {member: one for member, one in members.items() if base is None or member not in known[base]}
        known[name] = members
        also = f" It has the members of [{base}](#{base.lower()}), and:" if base else ""
        rows = [(f"`{one}`", type_of(member), meaning_of(one, member, schema)) for one, member in own.items()]
        texts.append(f"### {name}\n\n{schema['description']}{also}\n\n{table(['member', 'type', 'meaning'], rows)}")
    return "\n".join(texts)


def type_of(schema):
    """Return the type of a member in words, with its bounds."""
    if "$ref" in schema:
        return link_to(schema)
    if "oneOf" in schema:
        return " or ".join(type_of(one) for one in schema["oneOf"])
    kinds = schema.get("type", "any")
    text = " or ".join(kinds) if isinstance(kinds, list) else kinds
    text = text.replace("string", "time") if schema.get("format") == "date-time" else text
    if schema.get("items"):
        text += f" of {type_of(schema['items'])}"
    low, high = schema.get("minimum"), schema.get("maximum")
    return text if low is None else f"{text}, {low} to {high}" if high is not None else f"{text}, {low} or more"


def meaning_of(name, member, schema):
    """Return the description of a member, with its values, its default, and whether a request needs it."""
    text = member["description"].partition("\n\n* `")[0]
    values = [str(one).rpartition(":")[2] for one in member.get("enum", ()) if one is not None]
    default = member.get("default")
    return " ".join(
        filter(None, [
            text,
            f"One of {', '.join(f'`{one}`' for one in values)}." if values else "",
            "Required." if name in schema.get("required", ()) and not member.get("readOnly") else "",
            f"Default: {code(default)}." if default not in (None, "", {}) else "",
        ])
    )  # fmt: skip


def render_problems():
    from django_faktory.contrib.api.problems import KINDS

    return table(["type", "status", "title"], [(f"`{kind}`", *texts) for kind, texts in KINDS.items()])


# System checks


def render_checks():
    """Return the registered functions, with the option of `check` that runs them."""
    from django.core.checks.registry import registry
    from django.db import connections  # noqa: F401  (imports the checks of Django itself)

    options = {"database": "`--database default`"}
    rows = []
    for check in sorted({*registry.registered_checks, *registry.deployment_checks}, key=lambda one: one.__qualname__):
        if check.__module__.startswith("django_faktory."):
            option = "`--deploy`" if check in registry.deployment_checks else ""
            option = option or ", ".join(options[tag] for tag in check.tags if tag in options)
            rows.append((check.__doc__.partition("\n")[0], option))
    return table(["check", "only with"], rows)


RENDERERS = {
    "checks": render_checks,
    "command": render_command,
    "exit-codes": render_exit_codes,
    "limits": render_limits,
    "objects": render_objects,
    "operations": render_operations,
    "problems": render_problems,
    "settings": render_settings,
    "states": render_states,
    "task-options": render_task_options,
}


def set_up_django(*apps):
    """Configure Django with the models of the package, and more apps."""
    import django
    from django.conf import settings

    sys.path.insert(0, str(ROOT))
    if not settings.configured:
        settings.configure(
            INSTALLED_APPS=[
                *(f"django.contrib.{app}" for app in ("admin", "auth", "contenttypes", "messages")),
                *apps,
                "django_faktory",
            ],
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
            TASKS={"default": {"BACKEND": "django_faktory.backend.FaktoryBackend"}},
        )
        django.setup()


def main():
    set_up_django("rest_framework", "django_filters")
    for page in PAGES.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if (filled := fill(text)) != text:
            page.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
