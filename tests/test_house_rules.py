"""House rules that no linter checks: sizes, names, docstrings, and documentation pages that match the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import django_faktory
from django_faktory import conf
from django_faktory.checks import settings

pytestmark = [pytest.mark.linted, pytest.mark.core]

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def python_files(*folders):
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "node_modules" not in path.parts and (path.parent.name != "migrations" or path.name.startswith("_"))
    ]


PACKAGE = python_files("django_faktory")
OURS = [*PACKAGE, *python_files("example_project", "scripts", "benchmarks")]
TESTS = python_files("tests")
RULES_WITHOUT_TESTS: set[str] = set()


def name(path):
    return str(path.relative_to(ROOT))


@cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path):
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_a_module_has_at_most_600_lines():
    lines = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in [*OURS, *TESTS]}
    assert {path: count for path, count in lines.items() if count > 600} == {}


def test_each_module_has_a_docstring():
    silent = [
        name(path) for path in OURS if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(tree(path))
    ]
    assert silent == []


def test_only_init_modules_are_empty():
    assert [
        name(path) for path in OURS if not path.read_text(encoding="utf-8").strip() and path.name != "__init__.py"
    ] == []


def test_no_module_has_a_generic_name():
    nameless = {"utils", "util", "helpers", "common", "constants", "types", "misc"}
    assert [name(path) for path in [*OURS, *TESTS] if path.stem in nameless] == []


_PATCHED_CONSTANT = re.compile(r'setattr\(\s*(?:[\w.]+,\s*"|f?"[^"]*\.)([A-Z][A-Z_]{2,})"')
OF_OTHERS = {"NUM_PROXIES", "SUFFIX"}
"""A setting of Django REST framework, and a constant of the test that patches it."""


def test_no_test_patches_a_constant():
    """Times and sizes are parameters of the code: a patch hides them from callers, and breaks with each rename."""
    found = [(name(path), constant) for path in TESTS for constant in _PATCHED_CONSTANT.findall(path.read_text())]
    assert [patch for patch in found if patch[1] not in OF_OTHERS] == []
    assert {constant for _, constant in found} == OF_OTHERS, "the pattern finds patches"


def test_no_comment_contains_todo_or_fixme():
    later = re.compile(r"#\s*(TODO|FIXME|XXX|HACK)\b")
    assert [name(path) for path in [*OURS, *TESTS] if later.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("public", django_faktory.__all__)
def test_each_public_name_exists_and_has_a_docstring(public):
    assert getattr(django_faktory, public).__doc__


def test_each_protocol_rule_is_documented_and_named_by_a_test():
    rules = [f"W{number}" for number in range(1, 31)]
    page = (DOCS / "reference" / "protocol-rules.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (W\d+) \|", page, flags=re.MULTILINE) == rules
    named = rules_named_by_tests()
    assert [rule for rule in rules if rule not in named] == sorted(RULES_WITHOUT_TESTS)


def rules_named_by_tests():
    """Return the rules in docstrings of tests and of their modules; "W19 to W21" names three."""
    named = set()
    for path in TESTS:
        if path.parent.name == "gearmonkey":  # another protocol, with its own rules
            continue
        module = tree(path)
        named_nodes = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        tests = [node for node in named_nodes if node.name.startswith(("test_", "Test"))]
        for text in [ast.get_docstring(node) or "" for node in ([module, *tests] if tests else [])]:
            named |= set(re.findall(r"\bW\d+\b", text))
            for first, last in re.findall(r"\bW(\d+) to W?(\d+)\b", text):
                named |= {f"W{number}" for number in range(int(first), int(last) + 1)}
    return named


def test_each_gearmonkey_case_has_a_test_named_after_it():
    names = {node.name for path in TESTS if path.parent.name == "gearmonkey" for node in functions(path)}
    cases = [f"w{number:02}" for number in range(1, 37)] + [f"h{number:02}" for number in range(1, 17)]
    assert [case for case in cases if not any(found.startswith(f"test_{case}_") for found in names)] == []


def test_every_setting_in_use_is_defined():
    used = {
        (name(path), node.args[0].value)
        for path in PACKAGE
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "conf.get"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    assert [use for use in used if use[1] not in conf.DEFAULTS] == []


def snippets():
    for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]:
        for code in re.findall(
            r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
        ):
            yield page, code


def test_the_sqlite_options_are_the_same_everywhere():
    [code] = [code for _, code in snippets() if "transaction_mode" in code]
    found = {"DATABASES": {"default": {}}}
    exec(code, found)
    example = (ROOT / "example_project" / "settings.py").read_text(encoding="utf-8")
    assert found["DATABASES"]["default"]["OPTIONS"] == settings.SQLITE_OPTIONS
    assert all(f'"{key}": {value!r}'.replace("'", '"') in example for key, value in settings.SQLITE_OPTIONS.items())


def test_each_adr_has_at_most_60_lines_and_the_required_sections():
    for path in (DOCS / "adr").glob("0*.md"):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 60, name(path)
        assert re.findall(r"^## (\w+)", text, flags=re.MULTILINE) == ["Context", "Decision", "Consequences"], name(path)


def test_each_check_id_occurs_in_one_module_only():
    """A check id such as `E030`, with or without the app's name as prefix, occurs in one module only."""
    owners = {}
    for path in PACKAGE:
        text = path.read_text(encoding="utf-8")
        # An id by which a message is created or named; `message.id != "…"` only reads one.
        for number in set(re.findall(r'(?<!!= )"(?:django_faktory\.)?([EWI]\d{3})"', text)):
            owners.setdefault(number, []).append(name(path))
    assert owners
    assert {number: paths for number, paths in owners.items() if len(paths) > 1} == {}
