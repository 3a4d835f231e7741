"""Management commands and the processes that they start: the composition root."""
