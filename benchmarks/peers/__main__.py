"""Compare this project with its peers.

python -m benchmarks.peers                       everything, in less than half an hour on two cores
python -m benchmarks.peers --only huey,django-faktory --rounds 1 --jobs 300 --no-docs
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.peers import readings, report
from benchmarks.peers.asking import RESULTS, Agent, Failed, Place, Redis
from benchmarks.peers.environments import ROOT, CannotInstall, environment, interpreter
from benchmarks.peers.measures import MEASURES
from benchmarks.peers.systems import SYSTEMS


def arguments():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="This project and its peers.")
    parser.add_argument("--only", help=f"some of: {','.join(SYSTEMS)}")
    parser.add_argument("--measures", help=f"some of: {','.join(MEASURES)}")
    parser.add_argument("--rounds", type=int, default=3, help="of which the medians are taken")
    parser.add_argument("--jobs", type=int, default=3000, help="a drain; the quick systems get a multiple")
    parser.add_argument("--many", type=int, default=10_000, help="jobs enqueued at once")
    parser.add_argument("--calls", type=int, default=300, help="jobs enqueued one by one")
    parser.add_argument("--lone", type=int, default=100, help="jobs whose pick-up is timed")
    parser.add_argument("--idle-s", type=float, default=8.0, help="seconds of watching workers that have no job")
    parser.add_argument("--python", default="", help="of the environments, 3.12 or newer")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/performance.md and NOTEBOOK.md as they are")
    options = parser.parse_args()
    for name, known in (("only", SYSTEMS), ("measures", MEASURES)):
        chosen = [part for part in (getattr(options, name) or ",".join(known)).split(",") if part]
        if unknown := set(chosen) - set(known):
            parser.error(f"--{name}: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}")
        setattr(options, name, chosen)
    return options


class Run:
    """One run: set up every system, then measure them in turn, measure by measure, round by round."""

    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.redis = Redis()
        self.places, self.agents = {}, {}
        self.found = {
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": readings.machine(),
            "options": vars(options),
            "systems": {},
        }

    def set_up(self):
        python = interpreter(self.options.python)
        for name in self.options.only:
            system = SYSTEMS[name]
            kept = ("title", "store", "ours", "layout", "promise")
            about = self.found["systems"][name] = {key: getattr(system, key) for key in kept} | {
                "versions": {},
                "problems": [],
                "samples": {},
            }
            try:
                place = Place(system, environment(system, python), self.folder, self.redis)
                agent = self.agents[name] = Agent(place)
                about["versions"] = agent.prepare()
                about["database"] = agent.database()
                if system.store == "Redis":
                    self.found["machine"]["redis"] = agent.redis_version()
                self.places[name] = place
            except (CannotInstall, Failed) as error:
                about["problems"].append(f"not measured: {error}")
                print(f"{name}: {error}", flush=True)

    def measure(self):
        for turn in range(self.options.rounds):
            for measure in self.options.measures:
                order = [name for name in self.options.only if name in self.places]
                for name in order[turn % max(1, len(order)) :] + order[: turn % max(1, len(order))]:
                    if measure in (SYSTEMS[name].measures or MEASURES):
                        self._sample(name, measure, turn + 1)

    def _sample(self, name, measure, turn):
        about, began = self.found["systems"][name], time.monotonic()
        try:
            figures = MEASURES[measure](self.places[name], self.agents[name], self.options)
        except Failed as error:
            about["problems"].append(f"{measure}, round {turn}: {error}")
            figures = {"problem": str(error)}
        for key, value in figures.items():
            about["samples"].setdefault(key, []).append(value)
        shown = {key: round(value, 2) if isinstance(value, float) else value for key, value in figures.items()}
        print(f"{turn} {measure} {name} ({time.monotonic() - began:.0f} s): {json.dumps(shown)}", flush=True)

    def end(self):
        for agent in self.agents.values():
            try:
                agent.remove()
            except Failed as error:
                print(error)
            finally:
                agent.end()
        self.redis.end()


def main():
    options, began = arguments(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left running
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RESULTS) as folder:
        run = Run(options, Path(folder))
        try:
            run.set_up()
            run.measure()
        finally:
            run.end()
    run.found["minutes"] = round((time.monotonic() - began) / 60, 1)
    (RESULTS / "peers.json").write_text(json.dumps(run.found, indent=2) + "\n")
    print(report.page(run.found))
    if options.no_docs:
        return
    if report.is_whole(run.found, SYSTEMS, MEASURES):
        report.write(run.found, ROOT)
    else:
        print("no page is changed: that needs a run of all systems and measures, with at least 3 rounds and 1000 jobs")


if __name__ == "__main__":
    main()
