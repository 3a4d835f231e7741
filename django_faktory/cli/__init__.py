"""`manage.py faktory …`: each subcommand is an entry in a module of `groups`; adding one is adding a file there."""
