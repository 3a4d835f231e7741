"""Export metrics to Prometheus and spans to OpenTelemetry, and answer health checks.

Totals and sizes come from the database, so any process can export those of all nodes.
"""
