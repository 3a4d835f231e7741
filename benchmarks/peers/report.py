"""Write a run's report: the machine, a table, and what was not measured; and update two pages with it."""

from benchmarks.peers.arithmetic import ratio
from benchmarks.peers.chart import chart
from benchmarks.peers.figures import FIGURES, best_peers, medians, ratios

BEGIN, END = "<!-- peers: begin; written by python -m benchmarks.peers -->", "<!-- peers: end -->"


def page(found):
    """Return the whole report in Markdown."""
    parts = (_machine(found), table(found), beside_the_best(found), _set_ups(found), _problems(found))
    return "\n\n".join(part for part in parts if part) + "\n"


def table(found):
    """Return a line for each system: medians, and in brackets the ratios to the best peer's."""
    values, beside = medians(found), ratios(found)
    lines = [
        "| | " + " | ".join(figure.heading for figure in FIGURES) + " |",
        "|---|" + "---:|" * len(FIGURES),
    ]
    for name, about in found["systems"].items():
        cells = [_cell(figure, values[name][figure.key], beside[name][figure.key]) for figure in FIGURES]
        title = f"**{about['title']}**" if about["ours"] else about["title"]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def beside_the_best(found):
    """Return a line for each figure: ours, the best peer's, and the best peer's on PostgreSQL.

    Peers on PostgreSQL keep jobs as durably as this project.
    """
    systems = found["systems"].items()
    ours = next((name for name, about in systems if about["ours"] and about["store"] == "PostgreSQL"), None)
    if ours is None:
        return ""
    own, any_store, durable = medians(found)[ours], best_peers(found), best_peers(found, stores=("PostgreSQL",))
    lines = [
        f"| {found['systems'][ours]['title']} beside | its figure | best peer | best on PostgreSQL |",
        "|---|---:|---:|---:|",
    ]
    for figure in FIGURES:
        key, value = figure.key, own[figure.key]
        peers = [_cell(figure, best[key], ratio(value, best[key])) for best in (any_store, durable)]
        better = "more" if figure.more_is_better else "less"
        lines.append(f"| {figure.heading} ({better} is better) | {figure.shown(value)} | " + " | ".join(peers) + " |")
    lines.append("\nIn brackets here: our figure divided by theirs.")
    return "\n".join(lines)


def _cell(figure, value, beside):
    return figure.shown(value) + ("" if beside is None else f" ({beside:.2f})")


def _machine(found):
    about = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    options, databases = found["options"], {}
    for system in found["systems"].values():
        if "database" in system:
            databases["SQLite" if system["store"] == "SQLite" else "PostgreSQL"] = system["database"]
    stores = "; ".join(
        f"{store}: " + ", ".join(f"{name} {value}" for name, value in settings.items())
        for store, settings in databases.items()
    )
    return (
        f"{found['made_at']}: {about}. {stores}. Redis without persistence.\n"
        f"{options['rounds']} interleaved rounds, medians; "
        f"{options['jobs']} jobs a drain (the quick systems a multiple), "
        f"{options['many']} at once, {options['calls']} one by one, {options['lone']} lone ones. "
        "In brackets: how many times the best peer's figure; on SQLite, the best one's there."
    )


def _set_ups(found):
    lines = []
    for about in found["systems"].values():
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items()) or "not installed"
        lines.append(f"- {about['title']} ({about['store']}; {about['promise']}): {about['layout']}. {versions}")
    return "\n".join(lines)


def _problems(found):
    lines = [f"- {about['title']}: {problem}" for about in found["systems"].values() for problem in about["problems"]]
    return "What went wrong:\n\n" + "\n".join(lines) if lines else ""


def is_whole(found, systems, measures):
    """Return True if a run is complete enough for the docs.

    It needs every system and every measure, and enough rounds and jobs.
    """
    options = found["options"]
    wanted = (set(systems), set(measures))
    got = (set(options["only"]), set(options["measures"]))
    return got == wanted and options["rounds"] >= 3 and options["jobs"] >= 1000


def write(found, root):
    """Write chart and short table into docs/performance.md, the rest into benchmarks/NOTEBOOK.md, between markers.

    Raises ValueError without markers, and then changes nothing.
    """
    shown = ("![The figures of each system as bars](img/peers.svg)", beside_the_best(found))
    noted = (_machine(found), table(found), _set_ups(found), _problems(found))
    blocks = {root / "docs" / "performance.md": shown, root / "benchmarks" / "NOTEBOOK.md": noted}
    pages = {
        place: with_block(place.read_text(encoding="utf-8"), "\n\n".join(part for part in parts if part), place.name)
        for place, parts in blocks.items()
    }
    (root / "docs" / "img").mkdir(exist_ok=True)
    (root / "docs" / "img" / "peers.svg").write_text(chart(found), encoding="utf-8")
    for place, text in pages.items():
        place.write_text(text, encoding="utf-8")


def with_block(text, block, name):
    """Return the page with `block` between its markers, and all other text unchanged."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{name}: expected the lines {BEGIN} and {END}; put them where the table belongs")
    return f"{before}{BEGIN}\n{block.strip()}\n{END}{after}"
