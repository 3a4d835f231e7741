"""Handlers of protocol commands, by topic. `jobs.VERBS` has the handlers of all topics; the server calls them."""
