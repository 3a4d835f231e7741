"""Maintenance of tables: time-based work that is due, and vacuum."""
