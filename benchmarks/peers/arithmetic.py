"""Compute medians, percentiles and ratios to the best peer."""

import statistics


def median(values):
    """Return the median of the values that are not None, or None if there is none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def percentile(values, percent):
    """Return the smallest value that at least `percent` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def best(values, *, more_is_better):
    """Return the best of the values that are not None, or None if there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return max(known) if more_is_better else min(known)


def ratio(value, to):
    """Return `value / to`, or None if there is nothing to compare."""
    return None if value is None or not to else value / to
