"""Write docs/reference/settings.md from `django_faktory.conf`; the house rules' test sees that it is in step."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "settings.md"
INTRODUCTION = """\
# Settings

One dict in the project's settings, `FAKTORY = {…}`. Every key has a default. An unknown key or a wrong value is an
error of `manage.py check`, which also says what was meant.

<!-- Written by `make docs` from django_faktory/conf.py. Change the words there. -->

| key | default | meaning |
|---|---|---|
"""
REST = """
## Environment

| variable | meaning |
|---|---|
| `FAKTORY_URL` | The Faktory server that jobs are sent to and worked for, where it is not this project's database: `tcp://:password@host:7419`, or `tcp+tls://…`. |
| `FAKTORY_PROVIDER` | The *name* of the variable that holds that URL, as hosting services set it; it wins over `FAKTORY_URL`. |
| `GEARMONKEY_URL` | Redis of the GearMonkey clients and workers; it wins over the setting of that name. |
| `FAKTORY_PASSWORD` | The server's password, or a path beginning with `/` to a file that holds it; it wins over `PASSWORD`. |
"""


def render():
    """The page's text."""
    from django_faktory import conf  # found by the path that `main` sets

    rows = "".join(f"| `{key}` | `{shown(value)}` | {conf.DOCS[key]} |\n" for key, value in conf.DEFAULTS.items())
    return INTRODUCTION + rows + REST


def shown(value):
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:_}" if isinstance(value, int) and not isinstance(value, bool) and value > 9999 else str(value)


def main():
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
