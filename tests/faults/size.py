"""Size of the runs: FAKTORY_FAULTS is the number of jobs of one run. Without it there are no runs."""

import os

JOBS = int(os.environ.get("FAKTORY_FAULTS", "0"))


def scaled(at_5000):
    """Scale a count that is `at_5000` in a run of 5,000 jobs; at least 2."""
    return max(2, round(at_5000 * JOBS / 5000))
