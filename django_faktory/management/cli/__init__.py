"""`manage.py faktory …`: each module of `subcommands` adds subcommands; a new subcommand needs only a module there."""
