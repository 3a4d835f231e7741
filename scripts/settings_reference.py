"""Write docs/reference/settings.md from `django_faktory.conf`; tests/test_house_rules.py checks that it is current."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "settings.md"
INTRODUCTION = """\
# Settings

One dict in the project's settings, `FAKTORY = {…}`. Every key has a default. `manage.py check` reports unknown keys, with a
suggestion, and invalid values.

<!-- Written by `make docs` from django_faktory/conf.py. Change the words there. -->

| key | default | meaning |
|---|---|---|
"""
REST = """
## Environment

| variable | meaning |
|---|---|
| `FAKTORY_URL` | URL of the Faktory server that stores the jobs, if this project's database does not: `tcp://:password@host:7419`, or `tcp+tls://…`. |
| `FAKTORY_PROVIDER` | *Name* of the variable that contains this URL, as hosting services set it. It takes precedence over `FAKTORY_URL`. |
| `GEARMONKEY_URL` | URL of the Redis server that GearMonkey clients and workers use. It takes precedence over the setting of this name. |
| `FAKTORY_PASSWORD` | Password of the server, or a path that begins with `/` of a file that contains it. It takes precedence over `PASSWORD`. |
"""


def render():
    """Return the text of the whole page."""
    from django_faktory import conf  # found by the path that `main` sets

    rows = "".join(
        f"| `{key}` | `{shown(setting.default)}` | {setting.doc} |\n" for key, setting in conf.SETTINGS.items()
    )
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
