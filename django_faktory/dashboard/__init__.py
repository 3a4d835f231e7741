"""The pages of the admin that people on call live on: overview, jobs, errors, queues, workers."""
