"""Define the figures of a run: names, which direction is better, and medians compared with the best peer's."""

from dataclasses import dataclass

from benchmarks.peers.arithmetic import best, median, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One column of the table."""

    key: str
    heading: str
    title: str  # of its panel in the chart
    more_is_better: bool = False

    def shown(self, value):
        """Format a number for people, with about three significant digits."""
        if value is None:
            return "–"
        if abs(value) >= 1000:
            return f"{round(value, -1 if abs(value) < 10_000 else -2):,.0f}"
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _more(key, heading, title):
    return Figure(key=key, heading=heading, title=title, more_is_better=True)


def _less(key, heading, title):
    return Figure(key=key, heading=heading, title=title)


FIGURES = (
    _more("noop_per_s", "no-op jobs/s", "No-op jobs a second (more is better)"),
    _more("insert_per_s", "INSERT jobs/s", "Jobs with one INSERT a second (more is better)"),
    _less("enqueue_ratio", "enqueue ÷ create", "enqueue() ÷ a bare create() (less is better)"),
    _less("with_row_ratio", "the same, with a row", "enqueue() ÷ create(), with a row (less is better)"),
    _more("many_per_s", "enqueue many, jobs/s", "Jobs enqueued by one call, a second (more is better)"),
    _less("pick_up_p50_ms", "pick-up p50, ms", "Pick-up of a lone job, p50 in ms (less is better)"),
    _less("pick_up_p99_ms", "pick-up p99, ms", "Pick-up of a lone job, p99 in ms (less is better)"),
    _less("cpu_ms", "CPU/job, ms", "CPU a no-op job in ms: workers and store (less is better)"),
    _less("rss_mb", "RSS, MB", "Memory of the workers, RSS in MB (less is better)"),
    _less("pss_mb", "PSS, MB", "Memory of the workers, PSS in MB (less is better)"),
    _less(
        "idle_operations_per_s", "idle tx or commands/s", "Transactions or commands a second when idle (less is better)"
    ),
    _less("idle_cpu_percent", "idle CPU, %", "CPU when idle, % of a core (less is better)"),
)
CHARTED = ("noop_per_s", "insert_per_s", "pick_up_p50_ms", "cpu_ms")


def medians(found):
    """Return {system: {figure: median of its rounds}}; figures that were not measured are None."""
    return {
        name: {figure.key: median(about["samples"].get(figure.key, ())) for figure in FIGURES}
        for name, about in found["systems"].items()
    }


SERVED = ("PostgreSQL", "Redis")


def best_peers(found, *, stores=SERVED):
    """Return {figure: best median among the peers with one of these stores}, without our own systems."""
    values, systems = medians(found), found["systems"].items()
    peers = [values[name] for name, about in systems if not about["ours"] and about["store"] in stores]
    return {
        figure.key: best((peer[figure.key] for peer in peers), more_is_better=figure.more_is_better)
        for figure in FIGURES
    }


def ratios(found):
    """Return {system: {figure: ratio to the best peer's}}.

    Systems on SQLite are compared with peers on SQLite.
    """
    served, on_sqlite, found_ratios = best_peers(found), best_peers(found, stores=("SQLite",)), {}
    for name, row in medians(found).items():
        to = on_sqlite if found["systems"][name]["store"] == "SQLite" else served
        found_ratios[name] = {key: ratio(value, to[key]) for key, value in row.items()}
    return found_ratios
