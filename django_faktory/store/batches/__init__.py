"""Batches: membership, counters of jobs and the tree of parents and children."""
