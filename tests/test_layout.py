"""The package's layout: few entries in its root, no import loop, one class for each name; test names and commits."""

import ast
import re
import subprocess
from collections import Counter, defaultdict

import pytest

from tests.test_house_rules import PACKAGE, ROOT, TESTS, name, tree

pytestmark = [pytest.mark.linted, pytest.mark.core]

MAX_ROOT_ENTRIES = 20
MAX_SHARED_CLASS_NAMES = 5
MAX_SUBJECT = 72
SINCE = "2026-11-26"
"""Date of the first commit with a checked subject."""

ARCHAIC = re.compile(r"_(?:who|whom|nobody|somebody|told|tells?|anew|lest|for_ever|so_long_as)(?:_|$)")
"""Words for people in names of tests about jobs, threads and sockets, and archaic words."""

WEAK_VERBS = ("Let", "Tell", "Ask", "Say")


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PACKAGE}


def imports(path):
    """Return the modules of the package that this module imports, late and TYPE_CHECKING imports included."""
    own = module_name(path)
    package = own if path.name == "__init__.py" else own.rpartition(".")[0]
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{target}.{alias.name}" for alias in node.names}
            found |= (names & MODULES.keys()) or {target}
    return (found & MODULES.keys()) - {own}


def modules_in_loops():
    """Return the modules that can reach themselves: they remain after modules without imports are removed."""
    imported = {module: imports(path) for module, path in MODULES.items()}
    importers = defaultdict(set)
    for module, targets in imported.items():
        for target in targets:
            importers[target].add(module)
    for neighbours in (imported, importers):
        while ends := {module for module in imported if not neighbours[module] & imported.keys()}:
            for module in ends:
                del imported[module]
    return set(imported)


def test_the_package_root_has_few_entries():
    entries = [path for path in (ROOT / "django_faktory").iterdir() if path.name != "__pycache__"]
    modules = [path for path in entries if path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").exists())]
    assert len([path for path in modules if path.name != "__init__.py"]) <= MAX_ROOT_ENTRIES


def test_no_module_imports_itself_through_others():
    assert modules_in_loops() == set()


def test_a_class_name_is_used_in_one_module():
    """With few exceptions, such as the `Limit` of the models and that of the API's fields."""
    classes = Counter(
        node.name
        for path in PACKAGE
        for node in tree(path).body
        if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    )
    assert len([name for name, count in classes.items() if count > 1 and name != "Command"]) <= MAX_SHARED_CLASS_NAMES


def test_test_names_have_no_archaic_words():
    found = [
        f"{name(path)}:{node.name}"
        for path in TESTS
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if ARCHAIC.search(node.name)
    ]
    assert found == []


def test_commit_subjects_are_short_and_begin_with_a_verb_of_change():
    command = ["git", "log", f"--since={SINCE}T00:00:00Z", "--no-merges", "--format=%s"]
    log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if log.returncode:
        pytest.skip("this copy has no history")
    subjects = log.stdout.splitlines()
    assert [subject for subject in subjects if len(subject) > MAX_SUBJECT] == []
    assert [subject for subject in subjects if not re.match(r"[A-Z][a-z]+ ", subject) or subject[-1] == "."] == []
    assert [subject for subject in subjects if subject.split()[0] in WEAK_VERBS] == []
