"""Admin pages for operations: overview, jobs, errors, queues, workers."""
