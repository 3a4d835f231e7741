"""Calls and connections for PostgreSQL. The rules of its verbs are stored functions, in `functions/*.sql`."""
