"""Test units, images and manifests of the guides, and the files for hosts: they are valid, and timeouts suffice."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from django.core.management import load_command_class

from django_faktory import conf
from tests.docs.pages import ROOT, text_of

pytestmark = pytest.mark.core

GRACE_S = conf.DEFAULTS["SHUTDOWN_TIMEOUT"] + 5
"""Seconds that runfaktory may take to end: `docs/deploying.md`."""


def blocks(language, page):
    return re.findall(rf"^```{language}\n(.*?)^```", text_of("howto", page), flags=re.MULTILINE | re.DOTALL)


def units():
    for code in blocks("ini", "systemd.md"):
        yield re.match(r"# /etc/systemd/system/(\S+)", code)[1], code


def manifests():
    """Return the Kubernetes manifests of the guide by kind."""
    return {one["kind"]: one for code in blocks("yaml", "kubernetes.md") for one in yaml.safe_load_all(code)}


def runfaktory(command):
    """Parse a command line with the parser of `runfaktory`, and return its options."""
    words = command if isinstance(command, list) else shlex.split(command)
    place = words.index("runfaktory")
    assert words[place - 1] == "manage.py"
    parser = load_command_class("django_faktory", "runfaktory").create_parser("manage.py", "runfaktory")
    return parser.parse_args(words[place + 1 :])


def port_of(address):
    return int(address.rpartition(":")[2])


def run_tool(name, *arguments):
    """Run a program of this environment; return its exit code and its output."""
    command = [Path(sys.executable).with_name(name), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (apt: systemd)")
def test_systemd_accepts_the_documented_units(tmp_path):
    for name, code in units():
        (tmp_path / name).write_text(code.replace("/srv/shop/.venv/bin/python", sys.executable))
    names = sorted(path.name.replace("@.", "@mail.") for path in tmp_path.iterdir())
    assert len(names) == 2
    done = subprocess.run(
        ["systemd-analyze", "verify", *names], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if "faktory" in line]
    assert (done.returncode, complaints) == (0, [])


@pytest.mark.parametrize(("name", "code"), [pytest.param(*one, id=one[0]) for one in units()])
def test_a_unit_has_valid_options_and_a_sufficient_stop_timeout(name, code):
    given = dict(line.split("=", 1) for line in code.splitlines() if re.match(r"[A-Z]\w+=", line))
    assert runfaktory(given["ExecStart"]).worker_only is ("@" in name)
    assert int(given["TimeoutStopSec"]) > GRACE_S
    assert given["KillMode"] == "mixed"


@pytest.mark.parametrize("kind", ["Deployment", "Service"])
def test_kubernetes_accepts_the_documented_manifests(kind):
    kubernetes_validate.validate(manifests()[kind], "1.37", strict=True)


def test_probes_and_service_of_the_deployment_match_its_ports():
    spec = manifests()["Deployment"]["spec"]
    pod = spec["template"]
    (container,) = pod["spec"]["containers"]
    options = runfaktory([*container["command"], *container["args"]])
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"faktory": port_of(options.address), "health": port_of(options.health)}
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert container[probe]["httpGet"] == {"path": path, "port": "health"}
    assert pod["spec"]["terminationGracePeriodSeconds"] > GRACE_S
    assert spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()

    service = manifests()["Service"]["spec"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert [one["targetPort"] for one in service["ports"]] == ["faktory"]


def test_the_startup_probe_allows_longer_than_the_migrations_wait():
    threshold = int(re.search(r"`failureThreshold: (\d+)`", text_of("howto", "kubernetes.md"))[1])
    period = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["periodSeconds"]
    assert threshold * period > conf.DEFAULTS["MIGRATIONS_WAIT"]


def test_the_scaled_object_refers_to_the_deployment():
    target = manifests()["ScaledObject"]["spec"]["scaleTargetRef"]["name"]
    assert target == manifests()["Deployment"]["metadata"]["name"]


def test_the_compose_file_is_valid_and_consistent(tmp_path):
    (code,) = blocks("yaml", "containers.md")
    (tmp_path / "compose.yaml").write_text(code)
    code_and_output = run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", tmp_path / "compose.yaml")
    assert code_and_output == (0, "ok -- validation done\n")
    compose = yaml.safe_load(code)
    services = compose["services"]
    for one in services.values():
        assert set(one.get("depends_on", ())) <= services.keys()
    assert {mount.partition(":")[0] for mount in services["database"]["volumes"]} == compose["volumes"].keys()

    ours = services["faktory"]
    options = runfaktory(ours["command"])
    assert ours["expose"] == [str(port_of(options.address))]
    assert f":{port_of(options.health)}/healthz" in ours["healthcheck"]["test"][-1]
    assert int(ours["stop_grace_period"].removesuffix("s")) > GRACE_S
    compile(ours["healthcheck"]["test"][-1], "healthcheck", "exec")


def test_the_image_command_is_in_exec_form():
    (code,) = blocks("dockerfile", "containers.md")
    command = yaml.safe_load(re.search(r"^CMD (.*)$", code, flags=re.MULTILINE)[1])
    assert runfaktory(command).worker_only is True


def test_hadolint_accepts_the_documented_image(tmp_path):
    (code,) = blocks("dockerfile", "containers.md")
    (tmp_path / "Dockerfile").write_text(code)
    assert run_tool("hadolint", "--no-color", tmp_path / "Dockerfile") == (0, "")


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/*.yml"),
        ("readthedocs", ".readthedocs.yaml"),
    ],
)
def test_files_for_the_hosts_are_valid(schema, pattern):
    files = sorted(ROOT.glob(pattern))
    assert files
    assert run_tool("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files) == (
        0,
        "ok -- validation done\n",
    )


def test_the_host_runs_the_script_of_all_checks():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert [step["run"] for step in workflow["jobs"]["everything"]["steps"] if "run" in step][-1] == ".ci/run"
