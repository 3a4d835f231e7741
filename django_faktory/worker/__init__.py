"""Run jobs in worker processes, with several threads each. Uses the broker through `WorkerBroker` only."""
