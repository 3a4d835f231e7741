"""Provide this version of the package, and a copy of it with another version number. Uses no Django.

Each is a folder for a process's path.
"""

import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from tests.programs import ROOT

PACKAGE = "django_faktory"
NEXT = "99.0.0"


class Version(NamedTuple):
    path: Path

    @property
    def name(self):
        text = (self.path / PACKAGE / "__init__.py").read_text(encoding="utf-8")
        return re.search(r'^__version__ = "(.+)"', text, flags=re.MULTILINE)[1]

    @property
    def environment(self):
        """The environment of a program of this version; it imports the tests from this checkout."""
        return {"PYTHONPATH": os.pathsep.join(map(str, (self.path, ROOT))), "PYTHONSAFEPATH": "1"}


def this():
    return Version(ROOT)


def next_one(folder):
    """Return a copy of this version that calls itself `NEXT`."""
    package = Path(folder) / PACKAGE
    shutil.copytree(ROOT / PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    module = package / "__init__.py"
    text, times = re.subn(r'(?m)^__version__ = ".*"$', f'__version__ = "{NEXT}"', module.read_text(encoding="utf-8"))
    assert times == 1
    module.write_text(text, encoding="utf-8")
    return Version(Path(folder))
