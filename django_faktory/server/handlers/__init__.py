"""Handlers of protocol commands, by topic."""
