"""Write docs/reference/licences.md: all packages that this package and its extras install, with their licences.

    python scripts/licences.py [--check]

The data come from the packages that are installed here. `--check` writes nothing: it fails if a licence is not
accepted, or if a direct dependency is missing on the page.
"""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "licences.md"
ACCEPTED = {
    "0BSD": "may be used, changed and passed on",
    "Apache-2.0": "may be used, changed and passed on; grants patents",
    "BSD-2-Clause": "may be used, changed and passed on",
    "BSD-3-Clause": "may be used, changed and passed on",
    "GPL-2.0-or-later": "of MariaDB's driver, which a project chooses with its database; nothing here is derived from it",
    "LGPL-3.0-only": "of PostgreSQL's driver; used as a library, its users may replace it",
    "MIT": "may be used, changed and passed on",
    "MIT-0": "may be used, changed and passed on",
    "MPL-2.0": "changes to its own files must be published",
    "PSF-2.0": "Python's own",
}
SPELLED = {
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd 3-clause": "BSD-3-Clause",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "gnu general public license (gpl)": "GPL-2.0-or-later",
    "gnu general public license v2 or later (gplv2+)": "GPL-2.0-or-later",
    "gnu library or lesser general public license (lgpl)": "LGPL-3.0-only",
    "gnu lesser general public license v3 (lgplv3)": "LGPL-3.0-only",
    "mit": "MIT",
    "mit license": "MIT",
    "python software foundation license": "PSF-2.0",
}
HEAD = """# Licences of what comes along

This package is under the MIT licence. What follows is installed with it, or with one of its extras; written by `make docs` from the
packages' own words. Versions, and what only some systems or Pythons need, depend on where you install.

| package | comes with | licence | |
|---|---|---|---|
"""


def direct():
    """Return {name: extras that require it}; the package itself is the extra with the empty name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    found = {}
    for extra, needed in groups.items():
        for requirement in needed:
            found.setdefault(name_of(requirement), set()).add(extra)
    return found


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def everything():
    """Return the same with all transitive dependencies that are installed, and the names of missing ones."""
    found, waiting, absent = direct(), list(direct()), []
    while waiting:
        name = waiting.pop()
        try:
            needed = distribution(name).requires or []
        except PackageNotFoundError:
            absent.append(name)
            continue
        for requirement in needed:
            marker = Requirement(requirement).marker
            if marker and not marker.evaluate({"extra": "binary" if name == "psycopg" else ""}):
                continue
            other = name_of(requirement)
            if is_installed(other) and not found[name] <= found.get(other, set()):
                found.setdefault(other, set()).update(found[name])
                waiting.append(other)
    return found, sorted(set(absent))


def is_installed(name):
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def licence(name):
    """Return the licence from the SPDX expression, or else from the field, or else from the classifier."""
    about = distribution(name).metadata
    names = [about.get("License-Expression") or "", about.get("License") or ""]
    classified = [one for one in about.get_all("Classifier") or [] if one.startswith("License ::")]
    names += [one.rpartition(" :: ")[2] for one in classified]
    for words in names:
        short = words.strip().splitlines()[0].strip() if words.strip() else ""
        parts = [SPELLED.get(part.lower(), part) for part in re.split(r" (?:OR|AND) ", short)]
        if short and all(part in ACCEPTED for part in parts):
            return " or ".join(parts) if " AND " not in short else " and ".join(parts)
    return f"unknown: {'; '.join(filter(None, (one.strip()[:40] for one in names)))}"


def rows(found):
    for name, extras in sorted(found.items()):
        if is_installed(name):
            what = licence(name)
            comes = "the package" if "" in extras else ", ".join(f"`[{extra}]`" for extra in sorted(extras))
            note = "; ".join(ACCEPTED.get(part, "") for part in re.split(" or | and ", what))
            yield name, comes, what, note


def main():
    found, absent = everything()
    table = list(rows(found))
    wrong = [f"{name}: {what}" for name, _, what, _ in table if what.startswith("unknown")]
    if wrong:
        sys.exit(f"licences: expected one of {', '.join(ACCEPTED)}; got {', '.join(wrong)}")
    if "--check" in sys.argv:
        page = PAGE.read_text(encoding="utf-8")
        if lacking := sorted(name for name in direct() if f"| {name} |" not in page):
            sys.exit(f"{PAGE.relative_to(ROOT)}: has no line for {', '.join(lacking)}: run make docs")
        print(f"licences: {len(table)} packages, all accepted; not installed here: {', '.join(absent) or 'none'}")
        return
    if absent:
        sys.exit(f"licences: not installed here, so unknown: {', '.join(absent)}; run make setup")
    PAGE.write_text(HEAD + "".join(f"| {' | '.join(row)} |\n" for row in table), encoding="utf-8")


if __name__ == "__main__":
    main()
