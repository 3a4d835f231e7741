"""The numbers for those who watch: Prometheus, statsd, probes. They are the database's, so any node tells them all."""
