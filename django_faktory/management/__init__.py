"""The composition root: commands, and the processes they start."""
