"""Where systems look for tasks: leads to those of the one that runs."""

import importlib
import os

from benchmarks.peers.systems import SYSTEMS

if SYSTEMS[os.environ["BENCH_SYSTEM"]].tasks_found_by_name:
    importlib.import_module(SYSTEMS[os.environ["BENCH_SYSTEM"]].tasks)
