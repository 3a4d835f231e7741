"""Locks of jobs with a lock key."""
