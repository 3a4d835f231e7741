"""The overview page of the admin."""
