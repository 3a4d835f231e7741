"""Statements and connections for PostgreSQL."""
