"""Limits: definitions, limiters and permits."""
