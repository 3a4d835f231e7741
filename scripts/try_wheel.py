"""Build wheel and sdist, check their contents, and use the wheel as a new user does: in empty environments.

    python scripts/try_wheel.py [--keep FOLDER | --sbom FOLDER]

Both are built twice, from two copies of the source, and must be equal: anybody can build them again and compare.
On each supported pair of Python and Django, a new project types what the README says: install, migrate, enqueue,
`runfaktory` until the job is done, open the admin. A Python that is not installed is left out, with a message.
`--sbom` only writes the list of what pip installs with the wheel and all its extras, in CycloneDX.
Needs the packages build, twine, check-wheel-contents and cyclonedx-bom, which `make setup` installs.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = (
    "py.typed",
    "templates/",
    "static/",
    "locale/de/LC_MESSAGES/django.mo",
    "migrations/0001",
    "store/dialects/postgresql/functions/push.sql",
    "management/commands/runfaktory.py",
)
ONLY_IN_SDIST = {"PKG-INFO", "pyproject.toml", ".gitignore", "hatch_build.py"}
SDIST_ROOTS = ("django_faktory/", "docs/", "README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md")

PAIRS = (("3.11", "5.2"), *((python, django) for python in ("3.12", "3.13") for django in ("5.2", "6.0", "6.1")))
"""Supported pairs of Python and Django; the first one also has its types checked."""

APP = "yourapp"
SETTINGS = """
INSTALLED_APPS += ["yourapp"]
DATABASES["default"]["OPTIONS"] = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
}
STATIC_ROOT = BASE_DIR / "static"
ALLOWED_HOSTS = ["*"]
"""

MODELS = """
from django.db import models


class Invoice(models.Model):
    pass
"""
IMPORTS = """
from django.db import transaction
from yourapp.models import Invoice
from yourapp.tasks import send_invoice

"""

LOOK = """
from django.contrib.auth.models import User
from django.test import Client
from django_faktory.models import Job

job = Job.objects.get()
assert job.state == "succeeded", job.state
User.objects.create_superuser("ann", password="secret")
client = Client()
assert client.login(username="ann", password="secret")
for page in ("", "django_faktory/", "django_faktory/job/", f"django_faktory/job/{job.pk}/change/"):
    answer = client.get(f"/admin/{page}", follow=True)
    assert answer.status_code == 200, (page, answer.status_code)
assert "send_invoice" in answer.content.decode()
"""

TYPED = """
import django_faktory
from django_faktory import Batch, Cron, Retry, task


@task(queue_name="mail", cron=Cron("@daily", args=(1,)))
def send_invoice(invoice_id: int) -> str:
    raise Retry("later", in_s=5)


send_invoice.enqueue(42)
with Batch() as batch:
    send_invoice.enqueue(1)
send_invoice.enqueue("42")  # here is what must be found
"""
WRONG = "[arg-type]"


def main():
    parser = argparse.ArgumentParser(description="Build wheel and sdist, check them, and use the wheel.")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="build into this folder, and leave it there")
    parser.add_argument(
        "--sbom", type=Path, metavar="FOLDER", help="only write the list of components into this folder"
    )
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if options.sbom:
            write_sbom(build(ROOT, Path(folder) / "dist")[0], options.sbom, Path(folder))
            return
        if options.keep and "/OWNER/" in repository():
            sys.exit(
                "expected the address of the project in pyproject.toml, got a placeholder: see CONTRIBUTING, Releases"
            )
        wheel, sdist = build(ROOT, options.keep or Path(folder) / "dist")
        check(wheel, sdist)
        build_again(wheel, sdist, Path(folder) / "again")
        refuse(wheel, Path(folder))
        for python, django in PAIRS:
            if program := interpreter(python):
                use(wheel, Path(folder) / f"{python}-{django}", program, django, is_typed=(python, django) == PAIRS[0])
            else:
                print_step(f"Python {python} with Django {django}: left out, it is not installed")
    print_step(f"good, {time.monotonic() - begun:.0f} s")


def repository():
    read = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return read["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]


def build(source, dist):
    """Build both, the wheel from the sdist: a file that is missing there is missing in the wheel too."""
    print_step("building")
    last = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True)
    environment = {**clean_environment(), "SOURCE_DATE_EPOCH": last.stdout.strip()}
    run(sys.executable, "-m", "build", "--quiet", "--outdir", dist, source, env=environment)
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return wheel, sdist


def build_again(wheel, sdist, folder):
    """Build both from a copy of the source: new times and another path must change no byte."""
    for name in committed():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    for first, second in zip((wheel, sdist), build(folder, folder / "dist"), strict=True):
        sums = [hashlib.sha256(one.read_bytes()).hexdigest() for one in (first, second)]
        if sums[0] != sums[1]:
            sys.exit(f"{first.name}: two builds differ: sha256 {sums[0]} and {sums[1]}")
        print_step(f"{first.name}: reproducible, sha256 {sums[0]}")


def write_sbom(wheel, out, folder):
    """Install the wheel with all its extras into an empty environment, and list what is there.

    By cyclonedx-bom, the format's own generator: it reads licences and dependencies, and validates its output.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    target = ("--python", folder / "venv" / "bin" / "python")
    run(
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        *target,
        "install",
        "-q",
        f"{wheel}[{','.join(extras)}]",
    )
    out.mkdir(parents=True, exist_ok=True)
    stem, version = wheel.name.removesuffix("-py3-none-any.whl"), wheel.name.split("-")[1]
    path, project = out / f"{stem}.cdx.json", folder / "pyproject.toml"
    # Of the metadata that is computed, the list needs the version.
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project.write_text(re.sub(r"^dynamic = .*$", f'version = "{version}"', text, flags=re.MULTILINE), encoding="utf-8")
    kind = ("--pyproject", project, "--mc-type", "library", "--output-reproducible", "--output-file", path)
    run(Path(sys.executable).with_name("cyclonedx-py"), "environment", folder / "venv", *kind)
    print_step(f"{path}")


def refuse(wheel, folder):
    """Check that pip says which Python is required if it is too old."""
    if not (program := interpreter("3.10")):
        print_step("Python 3.10: left out, it is not installed")
        return
    run(program, "-m", "venv", folder / "old")
    command = [folder / "old" / "bin" / "python", "-m", "pip", "install", "--no-deps", wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment())
    if done.returncode == 0 or "requires a different Python" not in done.stderr:
        sys.exit(f"expected pip to refuse Python 3.10 and to name the version, got {done.returncode}: {done.stderr}")


def check(wheel, sdist):
    print_step("checking their contents")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    # W004: migrations begin with a digit, so no import statement can name them.
    run(Path(sys.executable).with_name("check-wheel-contents"), "--ignore", "W004", wheel)
    ours = committed()
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expect(in_wheel == {name for name in ours if name.startswith("django_faktory/")}, "the wheel", in_wheel, ours)
    for part in NEEDED:
        expect(any(part in name for name in in_wheel), f"{part} in the wheel", in_wheel, ours)
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()} - ONLY_IN_SDIST
    wanted = {name for name in ours if name.startswith(SDIST_ROOTS)}
    expect(in_sdist == wanted, "the sdist", in_sdist, wanted)


def committed():
    """Return the repository's files as git lists them, with new files unless they are ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in output.splitlines() if (ROOT / name).exists()}


def expect(is_so, what, found, wanted):
    if not is_so:
        more = sorted(found - wanted)[:10]
        sys.exit(
            f"{what}: not as expected; present but not committed: {more}; of {len(wanted)}, {len(found)} are there"
        )


def interpreter(version):
    """Return the path of a Python of this version, or None."""
    places = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    asked = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    for place in filter(None, places):  # a name on PATH may be there and not work, as pyenv's do
        if subprocess.run([place, "-c", asked], capture_output=True, check=False).returncode == 0:
            return place
    return None


def readme(name):
    """Return the README's block that begins with this comment."""
    [block] = re.findall(rf"```python\n# {re.escape(name)}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return block


def use(wheel, folder, program, django, *, is_typed):
    """Set up a project and run a job, following only the README."""
    print_step(f"a project of its own, with {program} and Django {django}, in an empty environment")
    python, place = folder / "venv" / "bin" / "python", folder / "site"
    place.mkdir(parents=True)
    run(program, "-m", "venv", folder / "venv")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, f"django=={django}.*")
    inside = {"cwd": place, "env": {**clean_environment(), "DJANGO_SETTINGS_MODULE": "site_of_ann.settings"}}
    run(python, "-m", "django", "startproject", "site_of_ann", ".", cwd=place, env=clean_environment())
    run(python, "manage.py", "startapp", APP, **inside)
    with (place / "site_of_ann" / "settings.py").open("a") as settings:
        settings.write(readme("settings.py") + SETTINGS)
    (place / APP / "tasks.py").write_text(readme("yourapp/tasks.py"))
    (place / APP / "models.py").write_text(MODELS)
    enqueue = IMPORTS + readme("yourapp/views.py").replace("create(...)", "create()")
    run(python, "manage.py", "makemigrations", "-v0", APP, **inside)
    for words in (("check",), ("makemigrations", "--check", "--dry-run"), ("migrate", "-v0")):
        run(python, "manage.py", *words, **inside)
    run(python, "manage.py", "shell", "-v0", "-c", enqueue, **inside)
    run(python, "manage.py", "runfaktory", "127.0.0.1:0", "--drain", "--no-reload", **inside)
    run(python, "manage.py", "shell", "-v0", "-c", LOOK, **inside)
    run(python, "manage.py", "collectstatic", "--noinput", "-v0", **inside)
    if not any((place / "static" / "django_faktory").rglob("*.*")):
        sys.exit("no static file of ours was collected")
    if is_typed:
        typed(python, place)


def typed(python, place):
    """Check that each public name has a type, that correct calls pass, and that a wrong one is found."""
    print_step("types, as a user's mypy sees them")
    asked = "import django_faktory; print(*django_faktory.__all__); print(django_faktory.__file__)"
    names, where = subprocess.run(
        [python, "-c", asked], cwd=place, env=clean_environment(), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    if str(ROOT) in where:
        sys.exit(f"expected the installed package, got {where}")
    reveals = "".join(f"reveal_type(django_faktory.{name})\n" for name in names.split())
    (place / "typed.py").write_text(TYPED + reveals)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--python-executable", python, "typed.py"]
    lines = subprocess.run(
        command, cwd=place, env=clean_environment(), capture_output=True, text=True, check=False
    ).stdout.splitlines()
    notes = [line for line in lines if "Revealed type" in line]
    errors = [line for line in lines if ": error:" in line]
    if len(notes) != len(names.split()) or any('"Any"' in line for line in notes):
        sys.exit("a public name has no type:\n" + "\n".join(lines))
    if len(errors) != 1 or WRONG not in errors[0]:
        sys.exit("expected one error, of the wrong argument:\n" + "\n".join(lines))


def clean_environment():
    """Return the environment without variables that lead to this checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DJANGO_SETTINGS_MODULE")}


def run(*command, **more):
    done = subprocess.run(list(map(str, command)), check=False, **{"env": clean_environment(), **more})
    if done.returncode:
        sys.exit(f"failed with {done.returncode}: {' '.join(map(str, command))[:200]}")


def print_step(text):
    print(f"-- {text}", flush=True)


if __name__ == "__main__":
    main()
