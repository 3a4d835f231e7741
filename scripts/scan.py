"""Scan the repository's files for secrets, and the installed packages for known vulnerabilities.

`scan.py secrets`: detect-secrets reports keys and tokens that are not in `.secrets.baseline`; `--accept` rewrites that
file, after a person has checked them. Passwords that are recognizable by name are left to ruff (S105 to S107).
`scan.py audit`: pip-audit queries PyPI's vulnerability service; if that cannot be reached, it prints so and does not
fail.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ".secrets.baseline"
BIN = Path(sys.executable).parent
AUDIT_S = 20
"""The service may hang or be unreachable; CI does not wait longer than this."""


def secrets(*, accept, root=ROOT):
    """Return exit code 1 if there is a secret that has not been accepted."""
    baseline = root / BASELINE
    command = [BIN / "detect-secrets", "scan", "--no-verify", "--disable-plugin", "KeywordDetector"]
    done = subprocess.run(
        [*command, "--exclude-files", r"\.secrets\.baseline"], cwd=root, capture_output=True, check=True
    )
    found = {
        (path, one["hashed_secret"]): one
        for path, several in json.loads(done.stdout)["results"].items()
        for one in several
    }
    if accept:
        rows = sorted([path, one["type"], digest] for (path, digest), one in found.items())
        baseline.write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n", encoding="utf-8")
        print(f"secrets: {len(rows)} accepted in {BASELINE}")
        return 0
    known = {(path, digest) for path, _, digest in json.loads(baseline.read_text(encoding="utf-8"))}
    new = [
        f"{path}:{one['line_number']}: {one['type']}"
        for (path, digest), one in found.items()
        if (path, digest) not in known
    ]
    print("\n".join(new) or f"secrets: none but the {len(known)} of {BASELINE}")
    if new:
        print(f"secrets: {len(new)} new; remove them; if they are no secrets: scripts/scan.py secrets --accept")
    return 1 if new else 0


def audit():
    """Return exit code 1 if an installed package has a known vulnerability."""
    command = [
        BIN / "pip-audit",
        "--local",
        "--skip-editable",
        "--progress-spinner",
        "off",
        "--timeout",
        "5",
        "-f",
        "json",
    ]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=AUDIT_S, check=False)
        packages = json.loads(done.stdout)["dependencies"]
    except subprocess.TimeoutExpired:
        return left_out(f"no answer within {AUDIT_S} s")
    except ValueError:
        return left_out((done.stderr.strip().splitlines() or ["no answer"])[-1][:200])
    looked_at = [one for one in packages if "vulns" in one]
    holes = [(one["name"], one["version"], hole) for one in looked_at for hole in one["vulns"]]
    for name, version, hole in holes:
        print(f"{name} {version}: {hole['id']}, fixed in {', '.join(hole['fix_versions']) or 'no version yet'}")
    if not looked_at:
        return left_out(f"the service knows none of {len(packages)} packages")
    print(
        f"audit: {len(holes)} known vulnerabilities in {len(looked_at)} packages; left out: {len(packages) - len(looked_at)}"
    )
    return 1 if holes else 0


def left_out(reason):
    """Print the reason and return 0: an unreachable service is not a fault of the code."""
    print(f"audit: left out: PyPI's vulnerability service is unreachable: {reason}")
    return 0


def main():
    match sys.argv[1:]:
        case ["secrets"]:
            return secrets(accept=False)
        case ["secrets", "--accept"]:
            return secrets(accept=True)
        case ["audit"]:
            return audit()
    print("scan.py: expected secrets [--accept] or audit", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
