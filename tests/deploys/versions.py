"""Provide two versions of the package: this one, and a copy or a named release.

Each is a folder for a process's path. FAKTORY_PREVIOUS names an earlier release: a folder that contains
`django_faktory` (a checkout, an unpacked wheel), or a commit of this repository. Uses no Django.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.programs import ROOT

PACKAGE = "django_faktory"
NEXT = "99.0.0"
MIGRATIONS = sorted(path.stem for path in (ROOT / PACKAGE / "migrations").glob("[0-9]*.py"))

MIGRATION = """\
from django.db import migrations, models

import django_faktory.models.fields
import django_faktory.models.indexes
from django_faktory.migrations._in_use import TablesInUse


class Migration(migrations.Migration):
    dependencies = [("django_faktory", "{latest}")]
    operations = [
        TablesInUse(
            [
                *[migrations.AddField(name, "added", {added}) for name in {models}],
                migrations.AddField("Job", "added_at", {added_at}),
                migrations.AddIndex("Job", {index}),
                migrations.AddConstraint("Job", {constraint}),
            ]
        ),
        migrations.CreateModel(
            "Novelty",
            [("id", models.BigAutoField(primary_key=True)), ("text", models.TextField(default="", db_default=""))],
        ),
    ]
"""

MODELS = """

from django.db import models


class Novelty(models.Model):
    text = models.TextField(default="", db_default="")


for _model in ({models}):
    _model.add_to_class("added", {added})
Job.add_to_class("added_at", {added_at})
Job._meta.indexes.append({index})
Job._meta.constraints.append({constraint})
"""

CHANGES = {
    "added": 'models.CharField(max_length=40, default="", db_default="")',
    "added_at": "models.DateTimeField(null=True)",
    "index": 'models.Index(fields=["added_at"], name="faktory_added", condition=models.Q(added_at__isnull=False))',
    "constraint": 'models.CheckConstraint(condition=~models.Q(added="never"), name="faktory_never")',
}
"""Changes that the rule of docs/deploying.md allows in a release; `added` is a new column of every table."""


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


def next_one(folder, models, changes=CHANGES):
    """Return a copy of this version with one more migration, which changes the tables of `models`."""
    package = Path(folder) / PACKAGE
    shutil.copytree(ROOT / PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    _rewrite(package / "__init__.py", r'(?m)^__version__ = ".*"$', f'__version__ = "{NEXT}"')
    text = MIGRATION.format(latest=MIGRATIONS[-1], models=[model.__name__ for model in models], **changes)
    (package / "migrations" / "9999_next.py").write_text(text, encoding="utf-8")
    with (package / "models" / "__init__.py").open("a", encoding="utf-8") as module:
        module.write(MODELS.format(models=", ".join(model.__name__ for model in models), **changes))
    return Version(Path(folder))


def previous(folder, named):
    """Return the release at the folder or commit `named`."""
    if (Path(named) / PACKAGE).is_dir():
        return Version(Path(named).resolve())
    packed = subprocess.run(["git", "archive", named, PACKAGE], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x"], cwd=folder, input=packed.stdout, check=True)
    return Version(Path(folder))


def _rewrite(path, pattern, text):
    found, times = re.subn(pattern, text, path.read_text(encoding="utf-8"))
    assert times == 1, f"{path}: {pattern}"
    path.write_text(found, encoding="utf-8")
