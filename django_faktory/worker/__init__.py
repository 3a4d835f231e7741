"""Runs jobs: processes, threads, and one job at a time in each. A front over the port."""
