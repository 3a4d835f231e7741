"""Create a virtual environment with everything that `make` needs, from Python alone; a second run is fast.

Standard library only, and only syntax that an old Python can parse: it must be able to print which version it expects.
MariaDB's driver is compiled here. If that is not possible, it is left out with a message.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NODE_FOLDERS = (ROOT / "tests" / "interop" / "node", ROOT / "tests" / "browser" / "node")
"""Each has a package.json, whose description says why its package is needed."""
EXTRAS = ("api", "cli", "crypto", "metrics", "postgres", "redis")
GROUPS = ("dev", "docs", "example")
OLDEST = (3, 11)


def main():
    if sys.version_info < OLDEST:
        sys.exit("expected Python 3.11 or newer, got {}.{}: make PYTHON=python3.12".format(*sys.version_info[:2]))
    options = arguments()
    folder = ROOT / options.venv
    stamp = folder / "installed.json"
    extras, groups = (extras_of_example(), ("example",)) if options.example else (EXTRAS, GROUPS)
    wanted = {"place": [sys.version, str(ROOT)], "content": fingerprint(options)}
    found = read(stamp)
    present, names = found.pop("names", []), {*extras, *groups}
    if found != wanted or not names <= set(present):
        if folder.is_symlink():  # making it again empties the folder, which belongs to another checkout
            sys.exit(f"{options.venv} is a link to {folder.resolve()}, made for another checkout: remove the link")
        print_step(f"installing into {options.venv} (once; some minutes on a slow line)")
        if found.get("place") != wanted["place"]:
            make_venv(folder)
        install(folder, options, extras, groups)
        stamp.write_text(json.dumps({**wanted, "names": sorted({*names, *(present if found == wanted else ())})}))
    if not has_mysqlclient(folder) and (not options.example or database().startswith("mysql")):
        add_mysqlclient(folder)
    if options.node:
        for place in NODE_FOLDERS:
            add_node_packages(place)
    if options.browser:
        add_chromium(folder)
    if options.also:
        add_tool(folder, options.also)


def arguments():
    parser = argparse.ArgumentParser(description="Create a virtual environment with everything that make needs.")
    parser.add_argument("--venv", default=".venv", help="its folder")
    parser.add_argument("--django", help="Django version, such as 6.1 (default: the newest that this Python supports)")
    parser.add_argument("--example", action="store_true", help="only what the example project needs")
    parser.add_argument(
        "--node", action="store_true", help="also npm packages: a Faktory client and axe-core, for their tests"
    )
    parser.add_argument("--browser", action="store_true", help="also Chromium, for the browser tests")
    parser.add_argument("--also", choices=["fuzz", "mutants"], help="a group with the tool of one target")
    return parser.parse_args()


def fingerprint(options):
    """Return a hash of what decides the installed packages; if it is the same, nothing is installed again."""
    project = (ROOT / "pyproject.toml").read_bytes()
    return hashlib.sha256(project + str(options.django).encode()).hexdigest()


def read(stamp):
    try:
        return json.loads(stamp.read_text())
    except (OSError, ValueError):
        return {}


def extras_of_example():
    """Return the extras that the example project needs, with the driver of its database."""
    needs_driver = database().startswith(("postgres", "pgsql"))
    return ("api", "cli", *(["postgres"] if needs_driver else []), *(["redis"] if "REDIS_URL" in os.environ else []))


def database():
    return os.environ.get("DATABASE_URL", "")


def install(folder, options, extras, groups):
    # By name, not with pip's option --group, which the pip of Python 3.11 and 3.12 does not have.
    more = [line for group in groups for line in requirements(group)]
    more += [f"django=={options.django}.*"] if options.django else []
    if pip(folder, "--editable", f"{ROOT}[{','.join(extras)}]", *more) != 0:
        sys.exit(f"pip could not install this project into {options.venv} (see above); is there a network?")


def make_venv(folder):
    if not has_ensurepip() and not apt_install(["python{}.{}-venv".format(*sys.version_info[:2])]):
        sys.exit("expected Python's ensurepip, which is not there; on Debian and Ubuntu: apt-get install python3-venv")
    # In a new process, because this one does not see packages that were just installed. With --clear, because an
    # environment of another Python cannot be used.
    done = subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=False)
    if done.returncode != 0:
        sys.exit(f"could not make a virtual environment in {folder} (see above)")


def has_ensurepip():
    return subprocess.run([sys.executable, "-c", "import ensurepip"], check=False, capture_output=True).returncode == 0


def pip(folder, *what, quiet_errors=False):
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL if quiet_errors else None).returncode


def has_mysqlclient(folder):
    found = subprocess.run([str(folder / "bin" / "python"), "-c", "import MySQLdb"], check=False, capture_output=True)
    return found.returncode == 0


def add_mysqlclient(folder):
    missing = missing_for_mysqlclient()
    if missing and not apt_install(missing):
        print_step(
            f"MariaDB is left out: its driver is compiled here and needs {', '.join(missing)}; install them, run again"
        )
        return
    [driver] = requirements("mysql")
    if pip(folder, driver, quiet_errors=True) != 0:
        print_step(
            "MariaDB is left out: its driver could not be compiled; "
            f"to see why: {folder.name}/bin/pip install '{driver}'"
        )


def missing_for_mysqlclient():
    """Return the names of the Debian packages that compiling needs and this machine lacks."""
    packages = []
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        packages.append("gcc")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        packages.append("python{}.{}-dev".format(*sys.version_info[:2]))
    if shutil.which("pkg-config") is None:
        packages.append("pkg-config")
    if not any(is_known_to_pkg_config(name) for name in ("libmariadb", "mariadb", "mysqlclient")):
        packages.append("libmariadb-dev")
    return packages


def is_known_to_pkg_config(name):
    if shutil.which("pkg-config") is None:
        return False
    return subprocess.run(["pkg-config", "--exists", name], check=False).returncode == 0


def requirements(name):
    """Return the requirements of this extra or group."""
    import tomllib  # new in Python 3.11; `main` has checked the version

    read = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {**read["project"]["optional-dependencies"], **read["dependency-groups"]}[name]


def add_tool(folder, group):
    """Install the group if it is available for this machine; if it is not, its target prints a message."""
    [tool] = requirements(group)
    name = tool.partition(">")[0]
    found = subprocess.run([str(folder / "bin" / "python"), "-c", f"import {name}"], check=False, capture_output=True)
    if found.returncode != 0:
        print_step(f"installing {name}, for `make {group}`")
        pip(folder, "--only-binary=:all:", tool, quiet_errors=True)


def apt_install(packages):
    """Install Debian packages if this is Debian and we are root; return True if they are installed."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return False
    print_step(f"installing Debian's {', '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(["apt-get", "-qq", *command], env=environment, check=False, stdout=subprocess.DEVNULL)
    return done.returncode == 0


def add_node_packages(place):
    """Install what a package.json names if npm is available; if not, `scripts/test.py` reports the tests left out."""
    wanted = json.loads((place / "package.json").read_text())["dependencies"]
    found = {name: read(place / "node_modules" / name / "package.json").get("version") for name in wanted}
    if found == wanted or shutil.which("npm") is None:
        return
    print_step("installing npm's {}, for its tests".format(", ".join(" ".join(one) for one in wanted.items())))
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"]
    if subprocess.run(command, cwd=place, check=False, stdin=subprocess.DEVNULL).returncode != 0:
        print_step("npm could not install it (see above)")


def add_chromium(folder):
    """Install Chromium without windows if no Chromium is there: Debian's package, or else Playwright's download."""
    ask = "import sys; sys.path.insert(0, '.'); from tests.services import chromium_path; sys.exit(not chromium_path())"
    if subprocess.run([sys.executable, "-c", ask], cwd=ROOT, check=False).returncode == 0:
        return
    if not apt_install(["chromium-headless-shell", "fonts-dejavu-core"]):  # without a font its pages show empty boxes
        print_step("fetching Chromium, for the browser tests")
        fetch = [str(folder / "bin" / "playwright"), "install", "--only-shell", "chromium"]
        if subprocess.run(fetch, check=False).returncode != 0:
            print_step("Chromium could not be fetched (see above): install it, and run this again")


def print_step(text):
    print(f"-- {text}", flush=True)


if __name__ == "__main__":
    main()
