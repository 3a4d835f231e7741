"""Test that the reference pages list exactly what the code has: nothing is missing or obsolete."""

import ast
import importlib
import pkgutil
import re
from functools import cache

import pytest

import django_faktory
from django_faktory import conf, errors
from django_faktory.core import locket
from tests.docs.pages import ROOT, first_cells, section, text_of

pytestmark = pytest.mark.core

PACKAGE = sorted(
    path
    for path in (ROOT / "django_faktory").rglob("*.py")
    if path.parent.name != "migrations" or path.name.startswith("_")
)


@cache
def trees():
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in PACKAGE]


def calls(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


# Settings


@pytest.mark.parametrize("key", locket.DEFAULTS)
def test_the_locks_page_lists_each_key_of_locket(key):
    assert f"`{key}`" in text_of("locks.md")


def test_settings_named_in_the_docs_exist():
    known = {*conf.DEFAULTS}
    for path in (ROOT / "docs").rglob("*.md"):
        named = re.findall(r'FAKTORY\["(\w+)"\]', path.read_text(encoding="utf-8"))
        assert set(named) <= known, path


# Errors


def error_classes():
    for module in pkgutil.walk_packages(django_faktory.__path__, "django_faktory."):
        if ".migrations" not in module.name and not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
    found, left = set(), [errors.FaktoryError]
    while left:
        for kind in left.pop().__subclasses__():
            if kind.__module__.startswith("django_faktory."):
                found.add(kind.__name__)
                left.append(kind)
    return found


def test_the_errors_page_lists_exactly_the_error_classes():
    page = section(text_of("reference", "errors.md"), "## Classes")
    assert {cell for cell in first_cells(page) if cell[0].isupper()} == error_classes()


def lines_of_the_log():
    """Yield the event of each log call of at least WARNING: the text before the first `name=value`; "…" for values."""
    levels = ("warning", "error", "critical", "exception")
    for path, tree in trees():
        for call in calls(tree):
            word = ast.unparse(call.func)
            texts = [node.value for node in call.args if isinstance(node, ast.Constant) and isinstance(node.value, str)]
            is_logged = word.startswith("logger.") and call.func.attr in levels
            is_logged = is_logged or (word == "logger.log" and "ERROR" in ast.unparse(call.args[0]))
            if is_logged and texts:
                event = re.split(r" \w+=%| pid=%", texts[0])[0]
                yield path, re.sub(r"%[sdr]", "…", event)


FORWARDED = {"…", "job …"}
"""Events without a text of their own: the message of ReservationLost, and the outcome of a job."""


def test_the_errors_page_lists_each_log_event():
    page = section(text_of("reference", "errors.md"), "## Lines of the log")
    documented, logged = set(first_cells(page)), {event for _, event in lines_of_the_log()} - FORWARDED
    assert len(logged) > 80
    assert logged - documented == set()
    assert documented - logged == {
        f"the job was no longer this worker's when {what}"
        for what in ("its task ended: rolled back", "a step ended: rolled back", "a step began")
    }


def literal_text(node):
    """Return the text of a string or f-string, with "…" for values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) else "…"


def reasons_not_to_start():
    places = {
        "CommandError": ("commands/runfaktory.py", "runtime/", "contrib/gearmonkey/command.py"),
        "FaktoryError": ("runtime/health_server.py",),
    }
    for path, tree in trees():
        for call in calls(tree):
            if any(place in path.as_posix() for place in places.get(ast.unparse(call.func), ())):
                yield literal_text(call.args[0])


def test_the_errors_page_lists_each_startup_error():
    page = set(first_cells(section(text_of("reference", "errors.md"), "## runfaktory does not start")))
    reasons = set(reasons_not_to_start()) - {"…"}
    assert len(reasons) > 18
    assert reasons - page == set()


# System checks


def ids_of_checks():
    """Return the ids of checks in the code; `locket` builds its ids from its own numbers."""
    found = set()
    for path in PACKAGE:
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r'"(?:django_faktory\.)?([EWI]\d{3})"', text))
        if path.stem == "locket":
            numbers = {n.args[0].value for n in calls(ast.parse(text)) if ast.unparse(n.func) == "Problem"}
            found |= {f"{number[0]}03{number[1]}" for number in numbers}
    return found


def test_the_checks_page_lists_exactly_the_check_ids():
    documented = [cell for cell in first_cells(text_of("reference", "checks.md")) if re.fullmatch(r"[EWI]\d{3}", cell)]
    assert sorted(documented) == sorted(ids_of_checks())


def test_check_ids_named_in_the_docs_exist():
    known = ids_of_checks()
    for path in (ROOT / "docs").rglob("*.md"):
        assert set(re.findall(r"`([EWI]\d{3})`", path.read_text(encoding="utf-8"))) <= known, path


# Metrics


def test_the_metrics_page_lists_exactly_the_statsd_metrics():
    """tests/contrib/metrics tests the Prometheus metrics."""
    from django_faktory.core.histograms import Series
    from django_faktory.operations.statistics import ExportedStatistics
    from django_faktory.runtime import statsd

    states = dict.fromkeys(("scheduled", "working", "retries", "dead"), 1.0)
    named = {key: {} for key in ("latencies", "paused", "workers", "batches")}
    numbers = ExportedStatistics(**named, queues={"mail": 1.0}, sets=states, processed=1, failed=1, late=0)
    sums = Series()
    sums.succeeded = sums.failed = 1
    sent = [*statsd.format_job_counts({("mail", "send"): sums}), *statsd.format_sizes(numbers)]
    cells = first_cells(section(text_of("reference", "metrics.md"), "## statsd"))
    documented = {cell if cell.startswith("faktory.") else f"faktory{cell}" for cell in cells}
    assert documented == {line.partition(":")[0] for line in sent}


# Signals


def test_the_signals_page_lists_exactly_the_django_signals():
    own = {
        target.id
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == "Signal()"
        for target in node.targets
    }
    django = {"task_enqueued", "task_started", "task_finished"}
    documented = first_cells(section(text_of("reference", "signals.md"), "## Django's"))
    assert {cell.rpartition(".")[2] for cell in documented} == own | django


def test_the_signals_page_lists_exactly_the_handled_process_signals():
    from django_faktory.runtime.supervisor.contract import SIGNALS

    documented = first_cells(section(text_of("reference", "signals.md"), "## Of processes"))
    heard = {number.name.removeprefix("SIG") for number in SIGNALS} - {"CHLD"}
    assert {cell for cell in documented if cell.isupper()} == heard | {"KILL"}
