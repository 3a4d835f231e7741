"""Cron entries and their runs."""
