"""`manage.py faktory …`: each module of `groups` adds subcommands; a new subcommand needs only a module there."""
