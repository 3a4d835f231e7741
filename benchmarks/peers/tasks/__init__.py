"""The same two tasks, declared for each system."""
