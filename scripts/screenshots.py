"""Take a screenshot of every admin page, in light and dark, and write docs/screens.md, which shows them.

The pages and their data come from tests/browser/test_pages.py, which also checks the layout.
"""

import os
import subprocess
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "img" / "pages"
PAGE = ROOT / "docs" / "screens.md"

TITLES = {
    "overview": "Overview: what is wrong, what runs, what has passed",
    "tasks": "Tasks and queues: failures, waiting and running times",
    "task": "A task: figures of three periods, charts, errors",
    "jobs": "Jobs in a state, here the dead ones",
    "job": "A job: its attempts, its error, its arguments",
    "edit": "Editing a job before it runs again",
    "named": "A job of a known task: arguments by parameter",
    "edit-typed": "Editing it: a field for each parameter",
    "run": "Running a task manually",
    "errors": "Failed jobs, grouped by error",
    "error": "One error: test one job, then retry the others at a chosen pace",
    "all": "Acting on all jobs that a filter means",
    "queues": "Queues",
    "queue": "A queue",
    "workers": "Workers",
    "worker": "A worker: what it runs, quiet, terminate",
    "batches": "Batches",
    "batch": "A batch and its tree",
    "cron": "Cron entries",
    "entry": "A cron entry: its next times, its history",
    "new-entry": "A new cron entry",
    "limits": "Limits",
    "limit": "A limit, edited while jobs run",
    "new-limit": "A new limit",
    "locks": "Locks",
    "lock": "A lock",
    "outbox": "The outbox",
    "gearmonkey": "GearMonkey functions",
    "object": "Jobs about an object, in that object's own page",
    "app": "All of it in the admin's index",
}
HEAD = """# Every page of the admin

Screenshots of every page in the stock admin's two themes, with the data of a bad day. `make screenshots` takes them; [the admin](admin.md) describes the
pages.
"""


def _shrink(picture: Path) -> None:
    """Reduce the picture to 64 colours: enough for a page of the admin, and a third of the size."""
    with Image.open(picture) as seen:
        small = seen.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    small.save(picture, optimize=True)


def main() -> int:
    """Return the exit code of the tests, or 1 if a page has no title."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for old in PICTURES.glob("*.png"):
        old.unlink()
    tests = ["tests/browser/test_pages.py", "-k", "each_theme_and_width and desk", "-q", "-p", "no:randomly"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *tests],
        cwd=ROOT,
        env=os.environ | {"FAKTORY_SCREENSHOTS": str(PICTURES)},
        check=False,
    )
    if done.returncode:
        return done.returncode
    for picture in PICTURES.glob("*.png"):
        _shrink(picture)
    taken = {one.name.removesuffix("-desk-light.png") for one in PICTURES.glob("*-desk-light.png")}
    if taken != TITLES.keys():
        print(f"expected pictures of {sorted(TITLES)}, got {sorted(taken)}: give each page a title", file=sys.stderr)
        return 1
    parts = [HEAD]
    for name, title in TITLES.items():
        light, dark = (f"img/pages/{name}-desk-{theme}.png" for theme in ("light", "dark"))
        parts.append(f"## {title}\n\n| light | dark |\n|---|---|\n| ![light]({light}) | ![dark]({dark}) |\n")
    PAGE.write_text("\n".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
