"""The Django project in which every system runs, with its own settings and tasks."""
