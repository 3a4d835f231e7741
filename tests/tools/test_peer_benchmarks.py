"""The arithmetic of `python -m benchmarks.peers`, whose figures are published; no benchmark runs here."""

import re
import threading

import pytest

from benchmarks.peers import arithmetic, figures, marks, readings, report
from benchmarks.peers.asking import Failed
from benchmarks.peers.measures import MEASURES, _require_each_once
from benchmarks.peers.systems import SYSTEMS

pytestmark = pytest.mark.core


def system(title, *, ours=False, problems=(), **samples):
    return {
        "title": title,
        "store": "PostgreSQL",
        "ours": ours,
        "layout": "2 processes",
        "promise": "durable",
        "versions": {"django": "6.1"},
        "problems": list(problems),
        "samples": samples,
    }


def run(**systems):
    options = {"rounds": 3, "jobs": 3000, "many": 10_000, "calls": 300, "lone": 100}
    options |= {"only": list(SYSTEMS), "measures": list(MEASURES)}
    return {"made_at": "2026-11-21T10:00:00+00:00", "machine": {"cpus": 2}, "options": options, "systems": systems}


@pytest.fixture
def found():
    return run(
        ours=system("Ours & co", ours=True, noop_per_s=[9000, 30_000, 20_000], cpu_ms=[0.1, 0.1, 0.4]),
        fast=system("Fast", noop_per_s=[5000, 4000, 9000], cpu_ms=[0.5, 0.2, 0.4]),
        slow=system("Slow", noop_per_s=[700, 800, 900], cpu_ms=[2.0, 2.5, 3.0]),
        away=system("Away", problems=["not measured: away cannot be installed: no such package"]),
    )


def row(page, title):
    [line] = [line for line in page.splitlines() if re.match(rf"\| \**{re.escape(title)}\** \|", line)]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("values", "expected"), [([3, 1, 2], 2), ([4, 1, 2, 3], 2.5), ([7], 7), ([], None), ([None, 5, None], 5)]
)
def test_a_median_ignores_missing_figures(values, expected):
    assert arithmetic.median(values) == expected


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [(range(1, 101), 99, 99), (range(1, 101), 50, 50), ([5], 99, 5), ([3, 1, 2], 99, 3), (range(1, 201), 99, 198)],
)
def test_a_percentile_is_one_of_the_measured_figures(values, percent, expected):
    assert arithmetic.percentile(values, percent) == expected


def test_the_best_peer_has_the_highest_rate_or_lowest_cost_of_others(found):
    best = figures.best_peers(found)
    assert (best["noop_per_s"], best["cpu_ms"], best["pss_mb"]) == (5000, 0.4, None)


def test_ratios_are_medians_over_the_best_peers_median(found):
    ratios = figures.ratios(found)
    assert (ratios["ours"]["noop_per_s"], ratios["ours"]["cpu_ms"]) == (4.0, 0.25)
    assert (ratios["slow"]["noop_per_s"], ratios["fast"]["noop_per_s"]) == (0.16, 1.0)
    assert ratios["away"]["noop_per_s"] is None


def test_sqlite_systems_are_compared_only_with_sqlite_systems(found):
    found["systems"]["file"] = system("File", noop_per_s=[50_000]) | {"store": "SQLite"}
    found["systems"]["our file"] = system("Our file", ours=True, noop_per_s=[25_000]) | {"store": "SQLite"}
    ratios = figures.ratios(found)
    assert (ratios["our file"]["noop_per_s"], ratios["ours"]["noop_per_s"]) == (0.5, 4.0)


def test_a_failed_round_is_reported_and_excluded_from_the_median(found):
    found["systems"]["slow"]["problems"] = ["noop, round 2: stuck"]
    found["systems"]["slow"]["samples"]["noop_per_s"] = [700, 900]
    page = report.page(found)
    assert row(page, "Slow")[1] == "800 (0.16)"
    assert "- Slow: noop, round 2: stuck" in page


@pytest.mark.parametrize(
    ("option", "value"), [("rounds", 2), ("jobs", 300), ("only", ["huey"]), ("measures", ["noop", "insert"])]
)
def test_a_partial_run_is_not_written_to_the_docs(found, option, value):
    assert report.is_whole(found, SYSTEMS, MEASURES)
    found["options"][option] = value
    assert not report.is_whole(found, SYSTEMS, MEASURES)


def test_a_whole_run_is_written_between_the_markers_of_both_pages(found, tmp_path):
    places = [tmp_path / "docs" / "performance.md", tmp_path / "benchmarks" / "NOTEBOOK.md"]
    for place in places:
        place.parent.mkdir()
        place.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write(found, tmp_path)
    shown, noted = [place.read_text() for place in places]
    assert report.beside_the_best(found) in shown
    assert report.table(found) in noted
    assert all(
        text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text for text in (shown, noted)
    )
    assert "<svg" in (tmp_path / "docs" / "img" / "peers.svg").read_text()


def test_a_page_without_markers_leaves_both_pages_unchanged(found, tmp_path):
    for folder, name, text in (
        ("docs", "performance.md", f"{report.BEGIN}\n{report.END}"),
        ("benchmarks", "NOTEBOOK.md", ""),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    with pytest.raises(ValueError, match=r"NOTEBOOK.md: expected the lines"):
        report.write(found, tmp_path)
    assert (tmp_path / "docs" / "performance.md").read_text() == f"{report.BEGIN}\n{report.END}"


def test_marks_written_by_many_threads_are_all_read(tmp_path, monkeypatch):
    monkeypatch.setenv(marks.FOLDER, str(tmp_path))
    marks._forget()
    reader = marks.Marks(tmp_path)
    begin = threading.Barrier(5)

    def work(first):
        begin.wait()
        for number in range(first, 500, 5):
            marks.leave(number)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    marks._forget()
    assert sorted(number for number, _ in reader.look()) == list(range(500))
    _require_each_once(reader.look(), 500)


@pytest.mark.parametrize("numbers", [[0, 1], [0, 1, 1, 2], [0, 1, 1], [0, 1, 5]])
def test_a_job_lost_or_run_twice_fails_the_measure(numbers):
    with pytest.raises(Failed, match="expected 3 jobs to run once"):
        _require_each_once([(number, 1.0) for number in numbers], 3)


def test_cpu_time_of_new_and_ended_processes_is_handled():
    assert readings.cpu_between({1: 5.0, 2: 1.0}, {1: 6.5, 3: 0.25}) == 1.75
