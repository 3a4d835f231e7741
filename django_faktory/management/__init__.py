"""Management commands: `runfaktory`, and `faktory` with the subcommands in `cli`."""
