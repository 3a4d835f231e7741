"""Processes of `runfaktory`: configuration, roles, maintenance, relays, health and supervision."""
