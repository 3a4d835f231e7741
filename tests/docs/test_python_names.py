"""Test that the page of Python names has every public name, with its options explained and an example.

Sphinx writes signatures and docstrings into the page; `make site` fails for a name that cannot be imported.
"""

import inspect
import re
from contextvars import ContextVar
from importlib import import_module

import pytest

from tests.docs.pages import section, text_of

pytestmark = pytest.mark.core

MODULES = (
    "django_faktory",
    "django_faktory.contrib.gearmonkey",
    "django_faktory.contrib.metrics.opentelemetry",
    "django_faktory.contrib.metrics.views",
    "django_faktory.core.locket",
    "django_faktory.tasks.batch",
    "django_faktory.tasks.limits",
    "django_faktory.tasks.middleware",
    "django_faktory.tasks.tracing",
    "django_faktory.testing",
)
"""Modules of which `__all__` is the public interface."""

PAGE = text_of("reference", "python.md")
DIRECTIVE = re.compile(r"^\.\. auto\w+:: ([\w.]+)(?:\(\))?\n((?:   .*\n|\n(?=   ))*)", re.MULTILINE)
AS_ELSEWHERE = re.compile(r"[Ss]ee `\w+`|[Ll]ike `[\w.]+`|from async code|options? (?:are those )?of `@task`")
"""Words of a docstring that refer to that of another name."""


def entries():
    """Return the text of each entry of the page, by its heading."""
    headings = re.findall(r"^### .+$", PAGE, flags=re.MULTILINE)
    return {heading: section(PAGE, heading) for heading in headings}


def find(path):
    """Return the object at a dotted path."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError:
        return getattr(find(module), name)


def documented():
    """Yield the path of each documented object, and of each of its members that the page names."""
    for path, options in DIRECTIVE.findall(PAGE):
        yield path
        for names in re.findall(r":members: (.+)", options):
            yield from (f"{path}.{name.strip()}" for name in names.split(","))


PATHS = sorted(documented())


@pytest.mark.parametrize("module", MODULES)
def test_the_page_has_every_public_name_of_a_module(module):
    names = import_module(module).__all__
    found = [id(find(path)) for path in PATHS]
    assert [name for name in names if id(getattr(import_module(module), name)) not in found] == []


def test_each_documented_name_of_a_module_is_public():
    extra = [
        path for path in PATHS for module, _, name in [path.rpartition(".")]
        if module in MODULES and name not in import_module(module).__all__
    ]  # fmt: skip
    assert extra == []


def test_the_page_lists_the_names_of_compat():
    from django_faktory.tasks import compat

    listed = re.findall(r"`(\w+)`", section(PAGE, "### compat").partition("```")[0])
    assert sorted(listed) == sorted(name for name in compat.__all__ if not name.startswith("Generic"))


@pytest.mark.parametrize("heading", entries())
def test_an_entry_has_an_example_of_each_of_its_names(heading):
    code = "".join(re.findall(r"^```python\n(.*?)^```", entries()[heading], flags=re.MULTILINE | re.DOTALL))
    names = [path.rpartition(".")[2] for path, _ in DIRECTIVE.findall(entries()[heading])]
    assert code
    assert [name for name in names if not re.search(rf"\b{name}\b", code)] == []


@pytest.mark.parametrize("path", PATHS)
def test_a_name_has_a_docstring_that_explains_its_options(path):
    """An option is a parameter with a default, of a function or of a class whose signature the page shows."""
    obj = find(path)
    text = str(obj.field.help_text) if hasattr(obj, "field") else obj.__doc__
    assert text or isinstance(obj, ContextVar)  # Python keeps no docstring of an instance
    if not callable(obj) or f"{path}()" in PAGE or hasattr(obj, "__dataclass_fields__") or AS_ELSEWHERE.search(text):
        return
    options = [name for name, one in inspect.signature(obj).parameters.items() if one.default is not one.empty]
    assert [name for name in options if f"`{name}`" not in text] == []
