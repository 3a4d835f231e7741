"""Export metrics to Prometheus and statsd, and answer health checks.

Totals and sizes come from the database, so any node can export those of all nodes.
"""
