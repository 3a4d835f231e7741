"""Admin pages of jobs: the list, one job, errors, bulk actions, and *Run a task*."""
