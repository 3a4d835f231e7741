"""State changes of jobs, and queries for them."""
