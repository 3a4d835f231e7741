"""The overview page of the admin, and the pages of tasks."""
