"""Import the tasks of the running system, for systems that look for tasks in this module."""

import importlib
import os

from benchmarks.peers.systems import SYSTEMS

if SYSTEMS[os.environ["BENCH_SYSTEM"]].tasks_found_by_name:
    importlib.import_module(SYSTEMS[os.environ["BENCH_SYSTEM"]].tasks)
