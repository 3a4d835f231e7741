"""The Django project that every system runs in, each with its own settings and its own tasks."""
