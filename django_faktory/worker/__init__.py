"""Run jobs in worker processes, with several threads each. Uses the `Broker` port only."""
