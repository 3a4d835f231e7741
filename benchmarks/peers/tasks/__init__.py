"""The same two tasks, as each system declares them."""
