"""The arithmetic, the table and the chart of `python -m benchmarks.peers`; no benchmark runs here."""

import re
import threading
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks.peers import arithmetic, chart, figures, marks, readings, report
from benchmarks.peers.asking import Failed
from benchmarks.peers.measures import MEASURES, _require_each_once
from benchmarks.peers.systems import SYSTEMS

pytestmark = pytest.mark.core

SVG = "{http://www.w3.org/2000/svg}"


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


def test_the_table_has_a_row_per_system_with_figures_and_ratios(found):
    page = report.table(found)
    assert row(page, "Ours & co")[:3] == ["**Ours & co**", "20,000 (4.00)", "–"]
    assert row(page, "Slow")[1] == "800 (0.16)"
    assert {len(line.strip("|").split("|")) for line in page.splitlines()} == {len(figures.FIGURES) + 1}


def test_our_figure_is_compared_with_the_best_overall_and_on_postgresql(found):
    found["systems"]["fast"]["store"] = "Redis"
    lines = report.beside_the_best(found).splitlines()
    [rate] = [line for line in lines if line.startswith("| no-op jobs/s")]
    [cost] = [line for line in lines if line.startswith("| CPU/job")]
    assert rate.endswith("| 20,000 | 5,000 (4.00) | 800 (25.00) |")
    assert cost.endswith("| 0.10 | 0.40 (0.25) | 2.50 (0.04) |")


def test_a_run_without_our_system_has_no_comparison_table(found):
    del found["systems"]["ours"]
    assert report.beside_the_best(found) == ""
    assert row(report.page(found), "Slow")[1] == "800 (0.16)"


def test_a_system_that_could_not_be_measured_stays_in_the_report(found):
    page = report.page(found)
    assert set(row(page, "Away")[1:]) == {"–"}
    assert "- Away: not measured: away cannot be installed: no such package" in page


def test_a_failed_round_is_reported_and_excluded_from_the_median(found):
    found["systems"]["slow"]["problems"] = ["noop, round 2: stuck"]
    found["systems"]["slow"]["samples"]["noop_per_s"] = [700, 900]
    page = report.page(found)
    assert row(page, "Slow")[1] == "800 (0.16)"
    assert "- Slow: noop, round 2: stuck" in page


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (26_912.4, "26,900"),
        (3_456, "3,460"),
        (707.2, "707"),
        (15.16, "15.2"),
        (0.388, "0.39"),
        (None, "–"),
        (0, "0.00"),
    ],
)
def test_a_figure_is_shown_with_three_significant_digits(value, expected):
    assert figures.FIGURES[0].shown(value) == expected


def test_the_svg_chart_has_a_proportional_bar_per_measured_system(found):
    picture = ET.fromstring(chart.chart(found))
    bars = [bar for bar in picture.iter(f"{SVG}rect") if bar.get("rx")]
    assert len(bars) == 3 * 2  # no-op jobs and CPU; the other panels are empty
    ours, fast, slow = (float(bar.get("width")) for bar in bars[:3])
    assert (fast / ours, slow / ours) == pytest.approx((0.25, 0.04), abs=0.001)
    assert [bar.get("fill") for bar in bars[:3]] == [chart.OURS, chart.THEIRS, chart.THEIRS]
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"Ours & co", "20,000", "0.10"} <= set(texts)


def test_a_chart_panel_lists_the_best_system_first(found):
    by_key = {figure.key: figure for figure in figures.FIGURES}
    values = figures.medians(found)
    assert [name for name, _ in chart.bars(by_key["noop_per_s"], found, values)] == ["ours", "fast", "slow"]
    assert [name for name, _ in chart.bars(by_key["cpu_ms"], found, values)] == ["ours", "fast", "slow"]
    assert [value for _, value in chart.bars(by_key["cpu_ms"], found, values)] == [0.1, 0.4, 2.5]


def test_write_replaces_only_the_text_between_the_markers(tmp_path, found):
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{report.BEGIN}\nold figures\n{report.END}\nafter\n", encoding="utf-8")
    report.write(found, tmp_path)
    report.write(found, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{report.BEGIN}\n![")
    assert text.endswith(f"\n{report.END}\nafter\n")
    assert "old figures" not in text
    assert text.count("20,000 (4.00)") == 1
    assert ET.parse(tmp_path / "img" / "peers.svg").getroot().tag == f"{SVG}svg"


def test_a_page_without_markers_is_left_unchanged(tmp_path, found):
    (tmp_path / "performance.md").write_text("no place for it\n", encoding="utf-8")
    with pytest.raises(ValueError, match="expected the lines <!-- peers: begin"):
        report.write(found, tmp_path)
    assert (tmp_path / "performance.md").read_text(encoding="utf-8") == "no place for it\n"
    assert not (tmp_path / "img").exists()


@pytest.mark.parametrize(
    ("option", "value"), [("rounds", 2), ("jobs", 300), ("only", ["huey"]), ("measures", ["noop", "insert"])]
)
def test_a_partial_run_is_not_written_to_the_docs(found, option, value):
    assert report.is_whole(found, SYSTEMS, MEASURES)
    found["options"][option] = value
    assert not report.is_whole(found, SYSTEMS, MEASURES)


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


def test_every_system_has_a_title_layout_promise_and_commands():
    assert {
        name for name, system in SYSTEMS.items() if not (system.title and system.layout and system.promise)
    } == set()
    assert [system.name for system in SYSTEMS.values()] == list(SYSTEMS)
    assert all(system.commands() for system in SYSTEMS.values())


def test_the_performance_page_has_the_markers_for_a_run():
    page = Path(report.__file__).parents[2] / "docs" / "performance.md"
    report.with_block(page.read_text(encoding="utf-8"), "figures")
