"""Counts of jobs and histograms of their durations."""
