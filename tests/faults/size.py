"""How big the runs are: jobs of one run from FAKTORY_FAULTS; the rest in proportion. Without it there are none."""

import os

JOBS = int(os.environ.get("FAKTORY_FAULTS", "0"))


def scaled(at_5000):
    """So many of what there is this often with 5,000 jobs."""
    return max(2, round(at_5000 * JOBS / 5000))
