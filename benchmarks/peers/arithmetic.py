"""Medians, percentiles, and how many times the best of the peers."""

import statistics


def median(values):
    """Of those that are there; None if none is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def percentile(values, percent):
    """The smallest value that at least so many percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def best(values, *, more_is_better):
    """The best of those that are there; None if none is."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return max(known) if more_is_better else min(known)


def ratio(value, to):
    """`value / to`; None where there is nothing to compare."""
    return None if value is None or not to else value / to
