"""A small shop whose slow work is done by tasks."""
